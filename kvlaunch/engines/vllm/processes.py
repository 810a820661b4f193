"""The entry points of vLLM's processes, wrapped: rank, log file, failure record, life tied to the run's.

The scheduler and the workers are forked from the fork server, where no plugin has run (see `forking`), or spawned; never
forked from one another. So each wrapper starts where the class that it wraps is still vLLM's own.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from kvlaunch.engines import ranks
from kvlaunch.engines.vllm import compat, forking
from kvlaunch.env import RunEnv, read_run_env
from kvlaunch.errors import CompatibilityError
from kvlaunch.launch.failure import record_failure
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.tether import tether
from kvlaunch.plan.types import LaunchPlan

FAILURE_LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
"""Where vLLM reports the exception that ends a worker or the scheduler."""


class FailureRecorder(logging.Filter):
    """Keeps the first exception that ends this process as its failure record.

    A filter, and not a handler: configuring vLLM's logging takes the handlers off its loggers.
    """

    def __init__(self, paths: RunPaths, who: str, rank: int | None, log: Path) -> None:
        super().__init__()
        self._about = (paths.root, who, rank, log)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception):
            root, who, rank, log = self._about
            record_failure(root, who, rank, error, log)
        return True


def install(run: RunEnv) -> None:
    """Make vLLM start its scheduler and its workers through this module, and end this process with the run."""
    from vllm.v1.engine import utils as engine_utils
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.executor.multiproc_executor import WorkerProc

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for owner, name, entry in (
        (EngineCoreProc, "run_engine_core", scheduler_main),
        (WorkerProc, "worker_main", worker_main),
    ):
        compat.seam(owner, name)
        setattr(owner, name, staticmethod(entry))
    if (context := forking.context()) is not None:
        for module in (engine_utils, multiproc_executor):
            compat.seam(module, "get_mp_context")
            module.get_mp_context = lambda: context
    tether(run.launcher_pid)


def scheduler_main(*args: Any, **kwargs: Any) -> None:
    """vLLM's scheduler process (`EngineCoreProc.run_engine_core`)."""
    run, plan = _enter()
    paths = RunPaths(run.run_dir)
    _watch_failures(FailureRecorder(paths, "scheduler", None, paths.engine_log))
    _log_kvlaunch("scheduler")

    from vllm.v1.engine.core import EngineCoreProc

    if plan.kv.mode == "elastic":
        from kvlaunch.engines.vllm.scheduler import SchedulerHooks

        SchedulerHooks(run, plan).install(kwargs["vllm_config"])
    EngineCoreProc.run_engine_core(*args, **kwargs)


def worker_main(*args: Any, **kwargs: Any) -> None:
    """One rank of vLLM (`WorkerProc.worker_main`)."""
    run, plan = _enter()
    paths = RunPaths(run.run_dir)
    rank = ranks.resolve_rank(plan, kwargs["rank"])
    ranks.export_rank(run, plan, rank)
    log = paths.rank_log(rank.global_rank)
    _redirect_output(log)
    _watch_failures(FailureRecorder(paths, f"rank{rank.global_rank}", rank.global_rank, log))
    _log_kvlaunch(f"rank {rank.global_rank}")

    from vllm.v1.executor.multiproc_executor import WorkerProc

    from kvlaunch.engines.vllm.worker import WorkerHooks

    hooks = WorkerHooks(run, plan, rank)
    hooks.install()
    try:
        WorkerProc.worker_main(*args, **kwargs)
    finally:
        hooks.close()


def _enter() -> tuple[RunEnv, LaunchPlan]:
    """What every wrapped process does first. Only processes of a run get here: the plugin installed the wrapper."""
    run = read_run_env()
    if run is None:
        raise CompatibilityError("This process lost the environment of its run; kvlaunch cannot serve it.")
    tether(run.launcher_pid)
    return run, LaunchPlan.load(run.run_dir / "plan.json")


def _watch_failures(recorder: FailureRecorder) -> None:
    for name in FAILURE_LOGGERS:
        logging.getLogger(name).addFilter(recorder)


def _log_kvlaunch(who: str) -> None:
    """kvlaunch's own messages go where the process's other lines go."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s [kvlaunch {who}] %(message)s"))
    logger = logging.getLogger("kvlaunch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _redirect_output(log: Path) -> None:
    """Send this process's output, and that of what it starts, to its own file."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
