"""Ending: whatever dies, and however, nothing of a run is left. With a fake engine."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlaunch.launch.state import load_agent
from tests.integration.launchkit import Kit, Launched, alive, awkward_kit, wait_until

HARD_TO_FIND = ("--detach-ranks", "--clear-environ")


@pytest.fixture
def kit() -> Iterator[Kit]:
    with awkward_kit() as kit:
        yield kit


def agent_pid(launched: Launched) -> int:
    agent = load_agent(launched.paths)
    assert agent is not None
    return agent.agent[0]


@pytest.mark.parametrize("flags", [(), HARD_TO_FIND], ids=["plain", "hard-to-find"])
def test_sigkill_of_the_launcher_ends_all_and_the_port_is_free_again(kit: Kit, flags: tuple[str, ...]) -> None:
    plan = kit.plan("--ignore-term", *flags)
    first = kit.launch(plan)
    first.wait_for("ready")
    agent = agent_pid(first)
    first.process.kill()
    first.wait_gone(5)
    wait_until(lambda: not alive(agent), 1, "the agent ends too")
    again = kit.launch(kit.plan(*flags, port=plan.server.port))
    again.wait_for("ready")
    again.process.send_signal(signal.SIGINT)
    assert again.end()[0] == 0
    assert first.state is not None
    assert first.state.state.value == "failed"


def test_an_engine_that_ignores_sigterm_is_killed_in_bounded_time(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--ignore-term", *HARD_TO_FIND, drain_s=1.0, term_s=1.0))
    launched.wait_for("ready")
    started = time.monotonic()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    assert 1.0 <= time.monotonic() - started < 1.0 + 1.0 + 3.0
    launched.wait_gone(0.1)


def test_a_second_ctrl_c_kills_at_once(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--ignore-term", tp=1, pp=1, term_s=60.0))
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for("stopping")
    time.sleep(0.6)  # a Ctrl-C within half a second counts as the same one
    started = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 0
    assert time.monotonic() - started < 3.0
    launched.wait_gone(0.1)


@pytest.mark.parametrize(("in_work", "drain_s", "least", "most"), [(1, 2.0, 2.0, 10.0), (0, 30.0, 0.0, 20.0)])
def test_running_requests_are_waited_for(kit: Kit, in_work: int, drain_s: float, least: float, most: float) -> None:
    launched = kit.launch(kit.plan("--in-work", str(in_work), tp=1, pp=1, drain_s=drain_s))
    launched.wait_for("ready")
    started = time.monotonic()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end(within_s=40)[0] == 0
    assert least <= time.monotonic() - started < most


def test_sigkill_of_the_agent_ends_all(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--ignore-term", *HARD_TO_FIND))
    launched.wait_for("ready")
    os.kill(agent_pid(launched), signal.SIGKILL)
    code, _, err = launched.end(within_s=5)
    assert code == 5
    assert "agent" in err
    assert "SIGKILL" in err
    launched.wait_gone(0.1)


def kill_both(launched: Launched) -> None:
    agent = agent_pid(launched)
    os.kill(agent, signal.SIGSTOP)  # it must not see the launcher die first
    launched.process.kill()
    os.kill(agent, signal.SIGKILL)


def test_tethered_ranks_end_with_launcher_and_agent(kit: Kit) -> None:
    launched = kit.launch(kit.plan("--ignore-term", "--tether", tp=2, pp=1))
    launched.wait_for("ready")
    kill_both(launched)
    launched.wait_gone(5)


def test_what_is_left_is_reaped_by_the_next_command_and_live_runs_are_respected(kit: Kit) -> None:
    mark = f"t{secrets.token_hex(4)}-"
    live = kit.launch(kit.plan("--shm", f"{mark}live", tp=1, pp=1))
    dead = kit.launch(kit.plan("--shm", f"{mark}dead", *HARD_TO_FIND, tp=2, pp=1))
    live.wait_for("ready")
    dead.wait_for("ready")
    for launched in (live, dead):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.fspath(launched.paths.listener_socket(0)))
    kill_both(dead)
    wait_until(lambda: sum(alive(pid) for pid in dead.pids()) == 2, 5, "only the two ranks are left")
    assert len(segments(mark + "dead")) == 2
    assert kit.verb("ps.run(json_output=True)")[0] == 0
    dead.wait_gone(0.1)
    assert segments(mark + "dead") == []
    assert not dead.paths.listener_socket(0).exists()
    assert dead.state is not None
    assert dead.state.state.value == "failed"

    assert live.paths.listener_socket(0).exists()
    assert all(alive(pid) for pid in live.pids())
    assert len(segments(mark + "live")) == 1
    live.process.send_signal(signal.SIGTERM)
    assert live.end()[0] == 0
    assert segments(mark) == []


def segments(prefix: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{prefix}*")]


def test_shared_memory_of_a_process_that_was_killed_at_once_is_removed(kit: Kit) -> None:
    mark = f"t{secrets.token_hex(4)}-"
    for _ in range(3):
        launched = kit.launch(kit.plan("--shm", mark, "--die-after", "0.3", tp=2, pp=1))
        assert launched.end()[0] == 5
        assert segments(mark) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_cycles_leave_nothing(kit: Kit) -> None:
    mark = f"t{secrets.token_hex(4)}-"
    plan = kit.plan("--shm", mark, *HARD_TO_FIND, tp=2, pp=1)
    for cycle in range(10):
        launched = kit.launch(kit.plan("--shm", mark, *HARD_TO_FIND, tp=2, pp=1, port=plan.server.port))
        if cycle % 3 == 0:
            launched.wait_for("ready")
            kill_both(launched)
            assert kit.verb("ps.run(json_output=True)")[0] == 0
        else:
            launched.wait_for_ranks(cycle % 3)
            launched.process.kill()
        launched.wait_gone(5)
    assert kit.verb("ps.run(json_output=True)")[1] == "[]\n"
    assert segments(mark) == []
    root = kit.runtime / "kvlaunch"
    assert not [path for path in root.rglob("*") if path.is_socket()]
    assert len([path for path in root.iterdir() if path.is_dir()]) == 5
