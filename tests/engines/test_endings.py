"""Deaths in real engines at tp=2 pp=2: a rank's, after which the engine comes back, and the launcher's: all ends."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from tests.engines.harness import ENGINES, Engine, launch, prompts, small, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ALL_GONE_S = 5.0
"""After the launcher was killed."""


def processes(engine: Engine) -> list[psutil.Process]:
    """Everything that the launcher started, however deep."""
    return psutil.Process(engine.process.pid).children(recursive=True)


def serves_again(engine: Engine, dead: int) -> bool:
    entry: dict[str, Any] = engine.ps()
    return entry["state"] == "ready" and dead not in {rank["pid"] for rank in entry["ranks"]}


@pytest.mark.supports("restart after a rank died (`max_restarts`)")
@pytest.mark.supports("nothing left after the launcher was killed")
@pytest.mark.parametrize("name", ENGINES)
def test_a_killed_rank_brings_a_new_generation_and_a_killed_launcher_ends_everything(name: str) -> None:
    with launch(*small(name), "tp=2", "pp=2", "max_restarts=1") as engine:
        before = engine.complete_all(prompts(8))
        victim = engine.kv_events()[3]["pid"]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: serves_again(engine, victim), 180, "a new generation that serves")
        assert engine.complete_all(prompts(8)) == before
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        assert sorted(engine.kv_events()) == [0, 1, 2, 3]

        everything = processes(engine)
        assert len(everything) >= 6, "the agent, the server and four ranks"
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait(10)
        _, alive = psutil.wait_procs(everything, timeout=ALL_GONE_S)
        assert not alive, f"still there {ALL_GONE_S} s after the launcher was killed: {alive}"
        # Orphans are reaped by init, in its own time: a zombie is no process that runs.
    with launch(*small(name)) as again:
        assert again.complete_all(prompts(2))
