"""The entry point of SGLang's scheduler processes, wrapped: every rank of SGLang is a scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from kvlaunch.engines import forking, ranks
from kvlaunch.engines.process import enter_rank
from kvlaunch.engines.sglang import compat
from kvlaunch.env import RunEnv
from kvlaunch.launch.tether import tether


def install(run: RunEnv) -> None:
    """Make SGLang start its schedulers through this module, and end this process with the run.

    Raises:
        CompatibilityError: the version is outside the tested window, or the hook did not take.
    """
    compat.WINDOW.check()
    compat.hook(
        {
            "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes": ("before", _start_ranks_here),
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog": ("replace", _end),
            "sglang.srt.entrypoints.engine.launch_dummy_health_check_server": ("before", _end_on_sigterm),
        }
    )
    if (context := forking.context()) is not None:
        from sglang.srt.entrypoints import engine

        compat.WINDOW.seam(engine, "mp")
        engine.mp = context
    tether(run.launcher_pid)


def _start_ranks_here(
    engine: Any, server_args: Any, port_args: Any, _run_scheduler_process: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (engine, server_args, port_args, rank_main), kwargs


async def _end(tokenizer_manager: Any) -> None:
    """Ends SGLang on SIGTERM (`TokenizerManager.sigterm_watchdog`).

    The launcher has let the running requests finish before. SGLang's own way looks for the signal every five seconds,
    and then waits for its schedulers, which under pipeline parallelism do not end by themselves.
    """
    from sglang.srt.utils import kill_process_tree

    while not tokenizer_manager.gracefully_exit:
        await asyncio.sleep(0.1)
    if tokenizer_manager._subprocess_watchdog is not None:
        tokenizer_manager._subprocess_watchdog.stop()
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(0)


def _end_on_sigterm(*_args: Any, **_kwargs: Any) -> None:
    """On a node that serves no HTTP: SGLang gets here when its ranks are up, and from then on ignores SIGTERM, in the
    belief that node 0 ends them."""
    from sglang.srt.utils import kill_process_tree

    def end(*_: object) -> None:
        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)


def rank_main(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, *args: Any) -> None:
    """One rank of SGLang (`run_scheduler_process`), in a fresh interpreter: SGLang spawns its processes."""
    run, plan, rank = enter_rank(lambda plan: ranks.rank_at(plan, pp_rank=pp_rank, tp_rank=tp_rank))

    from sglang.srt.managers.scheduler import run_scheduler_process

    from kvlaunch.engines.sglang.scheduler import RankHooks

    hooks = RankHooks(run, plan, rank)
    hooks.install()
    try:
        run_scheduler_process(server_args, port_args, gpu_id, tp_rank, pp_rank, *args)
    finally:
        hooks.close()
