"""The entry points of vLLM's processes, wrapped: rank, log file, failure record, life tied to the run's.

The scheduler and the workers are forked from the fork server, where no plugin has run (see `forking`), or spawned;
never forked from one another. So each wrapper starts where the class that it wraps is still vLLM's own.
"""

from __future__ import annotations

import os
from typing import Any

from kvlaunch.engines import forking, ranks
from kvlaunch.engines.process import FailureRecorder, enter_rank, enter_run, log_kvlaunch
from kvlaunch.engines.vllm import compat
from kvlaunch.env import RunEnv
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.tether import tether

FAILURE_LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
"""Where vLLM reports the exception that ends a worker or the scheduler."""


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
    run, plan = enter_run()
    paths = RunPaths(run.run_dir)
    FailureRecorder(paths, "scheduler", None, paths.engine_log).watch(*FAILURE_LOGGERS)
    log_kvlaunch("scheduler")

    from vllm.v1.engine.core import EngineCoreProc

    if plan.kv.mode == "elastic":
        from kvlaunch.engines.vllm.scheduler import SchedulerHooks

        SchedulerHooks(run, plan).install(kwargs["vllm_config"])
    EngineCoreProc.run_engine_core(*args, **kwargs)


def _count_ranks_as_devices(ranks: int) -> None:
    """Several nodes on the CPU: vLLM tells by the number of devices which ranks share a node with rank 0
    (create_from_process_group_single_reader in vllm/distributed/device_communicators/shm_broadcast.py), and the CPU
    counts as one: with two ranks a node it does not start."""
    from vllm.platforms import current_platform

    compat.seam(current_platform, "device_count")
    current_platform.device_count = lambda: ranks


def worker_main(*args: Any, **kwargs: Any) -> None:
    """One rank of vLLM (`WorkerProc.worker_main`)."""
    run, plan, rank = enter_rank(lambda plan: ranks.resolve_rank(plan, kwargs["rank"]))
    FailureRecorder.of_rank(RunPaths(run.run_dir), rank).watch(*FAILURE_LOGGERS)

    from vllm.v1.executor.multiproc_executor import WorkerProc

    from kvlaunch.engines.vllm.worker import WorkerHooks

    if plan.nnodes > 1 and plan.device == "cpu":
        _count_ranks_as_devices(len(plan.nodes[rank.node_rank].ranks))
    hooks = WorkerHooks(run, plan, rank)
    hooks.install()
    try:
        WorkerProc.worker_main(*args, **kwargs)
    finally:
        hooks.close()
