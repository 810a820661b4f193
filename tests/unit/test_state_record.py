"""What a run writes down of itself, and what is made of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlaunch.errors import EngineError, RendezvousError, RunNotFoundError
from kvlaunch.launch import reap, runs
from kvlaunch.launch.diagnose import ended_as, engine_failed, error_of, report_of
from kvlaunch.launch.failure import archive_failures, first_failure, record_failure
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.procfs import Identity, identity_of
from kvlaunch.launch.shm import Segment, existing, segments_of, unlink_segments
from kvlaunch.launch.state import RunState, StateRecord, load_state, save_state
from kvlaunch.launch.tail import Follower, last_lines

DEAD: Identity = (os.getpid(), 1)
"""This process's id with another start time: a process that is gone, its id taken again."""


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvl-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def make_run(run: str, state: RunState, *, owner: Identity | None = None, name: str = "n") -> RunPaths:
    me = identity_of(os.getpid())
    assert me is not None
    paths = RunPaths.of(run)
    paths.create()
    record = StateRecord(
        run=run, name=name, engine="vllm", model="m", state=state, url="http://x", owner=owner or me, started_at=1.0
    )
    save_state(paths, record)
    paths.plan.write_text("{}")
    when = 10**9 * (1 + len(list(paths.root.parent.iterdir())))
    os.utime(paths.plan, ns=(when, when))
    return paths


def test_transitions_are_those_of_the_docstring() -> None:
    allowed = {(a.value, b.value) for a in RunState for b in RunState if a.may_become(b)}
    assert allowed == {
        ("starting", "ready"),
        ("starting", "stopping"),
        ("starting", "failed"),
        ("ready", "starting"),
        ("ready", "stopping"),
        ("ready", "failed"),
        ("stopping", "stopped"),
        ("stopping", "failed"),
    }
    assert {state for state in RunState if state.final} == {RunState.STOPPED, RunState.FAILED}


def test_a_forbidden_transition_is_refused(runtime: Path) -> None:
    record = load_state(make_run("a", RunState.STOPPED))
    assert record is not None
    with pytest.raises(RuntimeError, match="stopped may not become ready"):
        record.become(RunState.READY)


def test_a_record_survives_writing_and_a_broken_one_is_none(runtime: Path) -> None:
    paths = make_run("a", RunState.READY)
    record = load_state(paths)
    assert record is not None
    record.processes, record.shm = [(1, 2), (3, 4)], [Segment("s", 5)]
    save_state(paths, record)
    assert load_state(paths) == record
    assert [path.name for path in paths.root.iterdir() if path.name.startswith(".")] == []
    paths.state.write_text('{"run": ')
    assert load_state(paths) is None


def test_a_process_id_that_was_taken_again_is_not_the_owner(runtime: Path) -> None:
    live, dead = make_run("a", RunState.READY), make_run("b", RunState.READY, owner=DEAD)
    states = [load_state(paths) for paths in (live, dead)]
    assert [state.live for state in states if state] == [True, False]


def test_runs_are_found_by_id_beginning_and_name(runtime: Path) -> None:
    for run, name in (("qwen-aa", "one"), ("qwen-ab", "two"), ("llama-x", "three")):
        make_run(run, RunState.READY, name=name)
    make_run("old-1", RunState.STOPPED, name="one")

    def find(wanted: str | None, *, live: bool = True) -> str:
        return runs.find_run(wanted, live=live)[1].run

    assert find("qwen-ab") == "qwen-ab"
    assert find("three") == "llama-x"
    assert find("lla") == "llama-x"
    assert find("one", live=False) == "qwen-aa"  # the live one of that name
    assert find(None, live=False) == "old-1"  # the newest
    with pytest.raises(RunNotFoundError, match="fits 2 runs"):
        find("qwen")
    with pytest.raises(RunNotFoundError, match="There are 3 live runs"):
        find(None)
    with pytest.raises(RunNotFoundError, match="qwen-aa"):
        find("nobody")


def test_dead_runs_are_reaped_and_the_newest_ended_ones_kept(runtime: Path) -> None:
    ended = [make_run(f"old-{i}", RunState.STOPPED) for i in range(6)]
    live = make_run("live", RunState.READY)
    dead = make_run("dead", RunState.STARTING, owner=DEAD)
    assert reap.reap_dead_runs() == ["dead"]
    assert [paths.root.exists() for paths in ended] == [False, False, True, True, True, True]
    record = load_state(dead)
    assert record is not None
    assert (record.state, record.failure is not None) == (RunState.FAILED, True)
    kept = load_state(live)
    assert kept is not None
    assert kept.live
    assert reap.reap_dead_runs() == []


def test_the_failure_that_came_first_is_reported(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    paths.rank_log(3).write_text("\x1b[31mboom\x1b[0m\n")
    assert record_failure(tmp_path, "rank3", 3, ValueError("first"), paths.rank_log(3))
    assert record_failure(tmp_path, "rank1", 1, ValueError("second"), paths.rank_log(1))
    assert not record_failure(tmp_path, "rank3", 3, ValueError("later"), paths.rank_log(3))
    error = engine_failed(paths, "ended")
    assert error.message == "rank 3 failed first: ValueError: first"
    assert (error.rank, error.log_path, error.log_tail) == (3, str(paths.rank_log(3)), "boom")
    archive_failures(tmp_path, 0)
    assert first_failure(tmp_path) is None
    assert (tmp_path / "failures-epoch0" / "rank3.json").exists()


def test_an_error_survives_its_report() -> None:
    error = EngineError("m", hint="h", rank=2, log_path="/l", log_tail="t")
    again = error_of(report_of(error))
    assert isinstance(again, EngineError)
    assert (again.message, again.hint, again.rank, again.log_path, again.log_tail) == ("m", "h", 2, "/l", "t")
    assert error_of(report_of(RendezvousError("r"))).exit_code == RendezvousError.exit_code


@pytest.mark.parametrize(
    ("status", "text"), [(3, "ended by itself with exit status 3"), (-9, "was ended by SIGKILL"), (-99, "signal 99")]
)
def test_exit_statuses_in_words(status: int, text: str) -> None:
    assert text in ended_as(status)


def test_segments_are_removed_only_when_unused_and_the_same_file() -> None:
    path = Path(f"/dev/shm/kvltest-{os.getpid()}")
    path.write_bytes(b"x")
    try:
        with path.open("rb"):
            (segment,) = {s for s in segments_of([os.getpid()]) if s.name == path.name}
            assert unlink_segments([segment]) == []
        assert existing([segment, Segment(path.name, segment.inode + 1)]) == {segment}
        assert unlink_segments([Segment(path.name, segment.inode + 1)]) == []
        assert unlink_segments([segment]) == [segment]
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_a_descriptor_that_is_closed_meanwhile_hides_no_other() -> None:
    path = Path(f"/dev/shm/kvltest-{os.getpid()}")
    path.write_bytes(b"x")
    try:
        with path.open("rb") as first, path.open("rb"):
            first.close()  # its number is free now, and the listing of the open files takes it for as long as it lasts
            assert path.name in {segment.name for segment in segments_of([os.getpid()])}
    finally:
        path.unlink(missing_ok=True)


def test_a_named_semaphore_is_found_though_it_was_mapped_by_another_name() -> None:
    before = segments_of([os.getpid()])
    lock = multiprocessing.get_context("spawn").Lock()
    (segment,) = segments_of([os.getpid()]) - before
    assert segment.name.startswith("sem.")
    assert unlink_segments([segment]) == []
    del lock
    gc.collect()
    assert existing([segment]) == set()


def test_a_follower_gives_whole_lines_and_the_rest_at_the_end(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "log")
    assert follower.lines() == []
    with (tmp_path / "log").open("w") as log:
        log.write("one\ntw")
        log.flush()
        assert follower.lines() == ["one"]
        log.write("o\nthree")
        log.flush()
        assert follower.lines() == ["two"]
        assert follower.lines(rest=True) == ["three"]
    (tmp_path / "log").write_text("cut\n")
    assert follower.lines() == ["cut"]


def test_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(1000)))
    assert last_lines(tmp_path / "log", 2) == "line 998\nline 999"
    assert last_lines(tmp_path / "nothing") == ""
