"""vLLM's processes come from one fork server, and end with it."""

from __future__ import annotations

import psutil
import pytest

from kvlaunch.errors import EngineError
from tests.engines.harness import SMALL, Engine, launch, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def family(engine: Engine) -> dict[str, list[psutil.Process]]:
    """Processes of the run by the first word of their title."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(engine.process.pid).children(recursive=True):
        found.setdefault(process.cmdline()[0].strip().split("_")[0], []).append(process)
    return found


def test_scheduler_and_ranks_are_forked_from_one_process_and_end_with_it() -> None:
    with launch(*SMALL, "tp=2", "pp=1") as engine:
        processes = family(engine)
        (server,) = processes["kvlaunch::ForkServer"]
        (scheduler,) = processes["VLLM::EngineCore"]
        workers = processes["VLLM::Worker"]
        assert {p.pid for p in server.children()} == {scheduler.pid, *(w.pid for w in workers)}
        assert {w.pid for w in workers} == {about["pid"] for about in engine.kv_events().values()}
        server.kill()
        wait_until(
            lambda: not any(p.is_running() for p in (scheduler, *workers)), 10, "the fork server's children live"
        )
        assert engine.process.wait(60) == EngineError.exit_code


def test_a_rank_whose_threads_are_bound_is_a_fresh_process() -> None:
    """OpenMP reads what binds its threads when it is loaded, which has happened in the fork server already."""
    with launch(*SMALL, "tp=1", "pp=1", "engine.env.VLLM_CPU_OMP_THREADS_BIND=0") as engine:
        processes = family(engine)
        (server,) = processes["kvlaunch::ForkServer"]
        (scheduler,) = processes["VLLM::EngineCore"]
        worker = psutil.Process(engine.kv_events()[0]["pid"])
        assert scheduler.ppid() == server.pid
        assert worker.ppid() == scheduler.pid
        assert worker.cpu_affinity() == [0]
        assert len(engine.complete("Hello", 8)) == 8
