"""Where the files of a run lie."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlaunch.errors import ConfigError
from kvlaunch.launch.paths import SOCKET_PATH_LIMIT, RunPaths, all_runs, runs_root
from kvlaunch.plan.ids import MAX_LENGTH


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="k '\"\n", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_folders_are_private_and_need_no_tmpdir(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere/" + "x" * 200)
    paths = RunPaths.of("run-1")
    paths.create()
    assert paths.root == runtime / "kvlaunch" / "run-1"
    for folder in (paths.root.parent, paths.root, paths.logs):
        assert folder.stat().st_mode & 0o777 == 0o700
    paths.create()  # once more does no harm


@pytest.mark.parametrize("base", ["/tmp/" + "x" * 60, "/nowhere", ""])
def test_sockets_have_room_whatever_the_runtime_folder(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    assert runs_root() == Path(f"/tmp/kvlaunch-{os.getuid()}")
    for base_of_forty in ("/tmp/" + "x" * 35,):
        root = Path(base_of_forty) / "kvlaunch" / ("r" * MAX_LENGTH)
        assert len(os.fsencode(RunPaths(root).listener_socket(999))) <= SOCKET_PATH_LIMIT


def test_a_folder_that_others_can_enter_is_refused_and_not_believed(runtime: Path) -> None:
    paths = RunPaths.of("run-1")
    paths.create()
    paths.plan.write_text("{}")
    assert [p.run for p in all_runs()] == ["run-1"]
    paths.root.parent.chmod(0o755)
    assert list(all_runs()) == []
    with pytest.raises(ConfigError, match="mode 0700"):
        RunPaths.of("run-2").create()


def test_a_link_in_place_of_the_folder_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "kvlaunch").symlink_to("elsewhere")
    with pytest.raises(ConfigError):
        RunPaths.of("run-1").create()


def test_runs_come_oldest_first_and_what_is_no_run_does_not_count(runtime: Path) -> None:
    for when, run in enumerate(["b", "c", "a"], start=1):
        paths = RunPaths.of(run)
        paths.create()
        paths.plan.write_text("{}")
        os.utime(paths.plan, ns=(when, when))
    RunPaths.of("unfinished").create()
    (runs_root() / ".lock").touch()
    assert [paths.run for paths in all_runs()] == ["b", "c", "a"]
