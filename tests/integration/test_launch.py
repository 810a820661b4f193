"""Starting: what a run exports, when it counts as ready, and how a failure is told. With a fake engine."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlaunch.events import read_events
from kvlaunch.launch.runs import rank_pids
from kvlaunch.launch.state import load_agent
from kvlaunch.plan.types import LaunchPlan
from tests.integration.launchkit import Kit, awkward_kit


@pytest.fixture
def kit() -> Iterator[Kit]:
    with awkward_kit() as kit:
        yield kit


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def phases(run_dir: Path) -> list[str]:
    return [event.phase for event in read_events(run_dir / "events.jsonl")[0]]


def test_a_run_is_ready_and_ends_on_request(kit: Kit) -> None:
    plan = kit.plan()
    launched = kit.launch(plan)
    launched.wait_for("ready")
    run_dir = launched.paths.root
    assert LaunchPlan.load(launched.paths.plan) == plan
    exported = json.loads((run_dir / "fake.env").read_text())
    assert exported["KVLAUNCH_RUN_ID"] == plan.run
    assert exported["KVLAUNCH_RUN_DIR"] == str(run_dir)
    assert exported["KVLAUNCH_EPOCH"] == "0"
    assert exported["KVLAUNCH_LAUNCHER_PID"] == str(launched.process.pid)
    assert exported["FAKE"] == "from the plan"
    assert "UNWANTED" not in exported
    assert (exported["RANK"], exported["WORLD_SIZE"], exported["LOCAL_RANK"]) == ("0", "1", "0")
    assert exported["MASTER_ADDR"] == "localhost"
    assert 0 < int(exported["MASTER_PORT"]) < 65536
    assert exported["TORCHELASTIC_USE_AGENT_STORE"] == "False"

    launched.process.send_signal(signal.SIGTERM)
    code, out, err = launched.end()
    assert code == 0
    assert f"http://127.0.0.1:{plan.server.port}" in out
    assert f"curl -s http://127.0.0.1:{plan.server.port}/v1/completions" in out
    assert "rank 3" in err
    wanted = ["spawned", "rendezvous", "engine", "weights", "kv", "ready", "stopping", "stopped"]
    assert list(dict.fromkeys(phases(run_dir))) == wanted
    launched.wait_gone(0.5)


def test_json_is_one_object_on_stdout(kit: Kit) -> None:
    plan = kit.plan(tp=1, pp=2)
    launched = kit.launch(plan, "json")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGINT)
    code, out, err = launched.end()
    assert code == 0
    entry = json.loads(out)
    assert set(entry) == {"run", "name", "engine", "model", "state", "url", "ranks"}
    assert (entry["run"], entry["state"]) == (plan.run, "ready")
    assert [rank["global_rank"] for rank in entry["ranks"]] == [0, 1]
    assert {rank["pid"] for rank in entry["ranks"]} < launched.pids()
    assert all(rank["kv"] is None for rank in entry["ranks"])  # static
    assert "is served by" in err


def test_ready_means_that_every_rank_confirmed_its_kv_state(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--kv", mode="elastic"), "json")
    launched.wait_for("ready")
    code, out, _ = kit.verb("ps.run(json_output=True)")
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 0
    (entry,) = json.loads(out)
    assert code == 0
    assert [rank["kv"] for rank in entry["ranks"]] == [{"reserved_bytes": 8 * 4096, "mapped_bytes": 4096}] * 4
    assert {rank["pid"] for rank in entry["ranks"]} < launched.pids()
    assert not [path for path in launched.paths.root.iterdir() if path.is_socket()]


def test_a_rank_without_kv_state_is_never_ready(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--kv", "--no-kv-rank", "3", mode="elastic", ready_s=5.0))
    code, _, err = launched.end()
    assert code == 5
    assert "3" in err.split("timeouts.ready_s")[1]
    assert "ready" not in phases(launched.paths.root)


def test_kv_state_is_asked_anew_after_a_restart(kit: Kit) -> None:
    flags = ("--kv", "--fail-rank", "1", "--fail-epochs", "1")
    launched = kit.launch(kit.plan(*flags, tp=2, pp=1, mode="elastic", max_restarts=1))
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGINT)
    code, out, _ = launched.end()
    assert code == 0
    assert out.count("4 KiB") == 2


def test_verbose_streams_the_logs_with_their_source(kit: Kit) -> None:
    launched = kit.launch(kit.plan(tp=1, pp=1), "verbose")
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGINT)
    _, _, err = launched.end()
    assert "[engine] fake engine starts, epoch 0" in err
    assert "[rank 0] rank 0 starts, epoch 0" in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_ready(kit: Kit, signum: signal.Signals, code: int) -> None:
    launched = kit.launch(kit.plan("--never-serve", tp=2, pp=1))
    launched.wait_for_ranks(3)
    launched.process.send_signal(signum)
    assert launched.end(within_s=20)[0] == code
    launched.wait_gone(0.5)
    assert launched.state is not None
    assert launched.state.state.value == "stopped"


@pytest.mark.parametrize("setting", ["server.port", "rdzv.endpoint"])
def test_a_taken_port_is_refused_at_once_naming_its_owner(kit: Kit, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plan = kit.plan(port=port) if setting == "server.port" else kit.plan(endpoint=f"127.0.0.1:{port}")
        started, spent = time.monotonic(), cpu_of_children()
        launched = kit.launch(plan)
        code, _, err = launched.end()
    # Within a second on a machine that has nothing else to do: it works for less, and waits for nothing.
    assert cpu_of_children() - spent < 1.0
    assert time.monotonic() - started < 5.0
    assert code == 2
    assert f"{setting}=" in err
    assert f"process {launched.process.pid}" not in err
    assert f"taken by process {os.getpid()} (" in err
    assert not launched.paths.root.exists()


def test_models_that_answer_are_not_ready_and_the_first_failed_rank_is_named(kit: Kit) -> None:
    flags = ("--dead-generation", "--fail-rank", "2", "--stay-after-failure")
    launched = kit.launch(kit.plan(*flags, ready_s=3.0))
    code, out, err = launched.end()
    assert code == 5
    assert out == ""
    assert "rank=2" in err
    assert "boom on rank 2" in err
    assert "ready" not in phases(launched.paths.root)
    launched.wait_gone(0.5)


def test_an_engine_that_never_generates_times_out(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--dead-generation", tp=1, pp=1, ready_s=3.0))
    code, _, err = launched.end()
    assert code == 5
    assert "not ready after 3 s" in err
    assert "/v1/completions did not answer" in err
    assert "fake engine starts" in err


def test_the_rank_that_raised_first_is_reported_not_its_peers(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--fail-rank", "3"))
    code, _, err = launched.end()
    assert code == 5
    assert "rank 3 failed first: RuntimeError: boom on rank 3" in err
    assert f"rank=3 log={launched.paths.rank_log(3)}" in err
    assert launched.state is not None
    assert launched.state.failure is not None
    assert launched.state.failure.rank == 3
    launched.wait_gone(0.5)


def test_a_rank_that_was_killed_is_named(kit: Kit) -> None:
    launched = kit.launch(kit.plan())
    launched.wait_for("ready")
    os.kill(rank_pids(launched.paths)[2], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 5
    assert "rank 2" in err
    assert "was killed or crashed" in err
    assert f"rank=2 log={launched.paths.rank_log(2)}" in err


def test_an_engine_that_was_killed_is_not_blamed_on_its_ranks(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--tether"))
    launched.wait_for("ready")
    agent = load_agent(launched.paths)
    assert agent is not None
    assert agent.engine is not None
    os.kill(agent.engine[0], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 5
    assert "The engine was ended by SIGKILL" in err
    assert "rank=None" in err


def test_an_engine_that_gives_up_is_reported_with_its_status_and_log(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--exit-code", "3", tp=1, pp=1))
    code, _, err = launched.end()
    assert code == 5
    assert "exit status 3" in err
    assert "fake engine gives up" in err


def test_a_failed_engine_is_restarted_in_a_new_epoch(kit: Kit) -> None:
    plan = kit.plan("--fail-rank", "1", "--fail-epochs", "1", tp=2, pp=1, max_restarts=1)
    launched = kit.launch(plan)
    launched.wait_for("ready")
    run_dir = launched.paths.root
    assert json.loads((run_dir / "fake.env").read_text())["KVLAUNCH_EPOCH"] == "1"
    assert (run_dir / "failures-epoch0" / "rank1.json").exists()
    assert not list((run_dir / "failures").iterdir())
    log = launched.paths.engine_log.read_text()
    assert "epoch 0" in log
    assert "epoch 1" in log
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 0
    launched.wait_gone(0.5)


def test_an_interpreter_that_does_not_exist(kit: Kit) -> None:
    launched = kit.launch(kit.plan(engine_python="/nowhere/python"))
    code, _, err = launched.end()
    assert code == 2
    assert "engine.python=/nowhere/python" in err


def test_nodes_that_do_not_meet(kit: Kit) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    launched = kit.launch(kit.plan(tp=1, pp=2, nnodes=2, endpoint=f"localhost:{port}", timeout_s=2.0))
    code, _, err = launched.end()
    assert code == 4
    assert f"localhost:{port}" in err
    assert "2 s" in err


def test_detach_ps_logs_stop(kit: Kit) -> None:
    plan = kit.plan(tp=1, pp=1)
    launched = kit.launch(plan, "detach")
    code, out, _ = launched.end()
    assert code == 0
    assert f"http://127.0.0.1:{plan.server.port}" in out
    code, out, _ = kit.verb("ps.run(json_output=True)")
    (entry,) = json.loads(out)
    assert (code, entry["run"], entry["state"]) == (0, plan.run, "ready")
    code, out, _ = kit.verb("ps.run(json_output=False)")
    assert plan.run in out
    assert entry["url"] in out
    code, out, _ = kit.verb("logs.run(None, rank=0, follow=False)")
    assert (code, out) == (0, "rank 0 starts, epoch 0\n")
    code, _, err = kit.verb("logs.run(None, rank=7, follow=False)")
    assert code == 9
    assert "rank0.log" in err
    code, _, err = kit.verb("stop.run('nobody', all_runs=False, json_output=False)")
    assert code == 9
    assert plan.run in err
    code, out, _ = kit.verb("stop.run(None, all_runs=False, json_output=True)")
    assert (code, json.loads(out)) == (0, [plan.run])
    launched.wait_gone(0.5)
    assert kit.verb("ps.run(json_output=True)")[1] == "[]\n"
    code, out, _ = kit.verb("logs.run(None, rank=None, follow=True)")
    assert code == 0
    assert "fake engine starts" in out


def test_detached_failure_has_the_same_exit_code(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--fail-rank", "0", tp=1, pp=1), "detach")
    code, _, err = launched.end()
    assert code == 5
    assert "rank 0 failed first: RuntimeError: boom on rank 0" in err
