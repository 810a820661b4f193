"""The scheduler side of the elastic KV cache: vLLM's one scheduler owns the pages of every rank of every stage."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

from kvlaunch.engines.rank_kv import CONNECT_TIMEOUT_S, settings_of
from kvlaunch.engines.stats_file import StatsFile
from kvlaunch.engines.vllm import compat
from kvlaunch.env import RunEnv
from kvlaunch.errors import CompatibilityError
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.manager import KVCacheManager
from kvlaunch.launch import listeners
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.types import LaunchPlan
from kvlaunch.secret import load_secret

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvlaunch.engines.vllm.block_pool import ElasticBlockPool


class SchedulerHooks:
    """What the scheduler process of a run carries beside vLLM's own."""

    def __init__(self, run: RunEnv, plan: LaunchPlan) -> None:
        self._run = run
        self._plan = plan
        self._core: Any = None
        self._pool: ElasticBlockPool | None = None
        self._manager: KVCacheManager | None = None
        self._tick_asked = False
        self._next_trim: float | None = None
        self._stats = StatsFile(RunPaths(run.run_dir))

    def install(self, config: VllmConfig) -> None:
        """Refuse what would run wrong, and put the elastic block pool in the place of vLLM's.

        Raises:
            CompatibilityError
        """
        from vllm.v1.core import kv_cache_coordinator
        from vllm.v1.engine.core import EngineCoreProc

        compat.refuse_unsupported(config)
        compat.seam(kv_cache_coordinator, "BlockPool")
        kv_cache_coordinator.BlockPool = self._make_pool
        run_busy_loop = compat.seam(EngineCoreProc, "run_busy_loop")

        @functools.wraps(run_busy_loop)
        def attached(core: Any) -> Any:
            self._attach(core)
            return run_busy_loop(core)

        EngineCoreProc.run_busy_loop = attached

    def _make_pool(self, *args: Any, **kwargs: Any) -> ElasticBlockPool:
        from kvlaunch.engines.vllm.block_pool import ElasticBlockPool

        kv, plan = self._plan.kv, self._plan
        if self._pool is not None:
            raise CompatibilityError("vLLM made a second block pool; kv=elastic serves one.")
        paths, here = RunPaths(self._run.run_dir), self._run.node_rank
        channel = ZmqChannel(
            listeners.endpoints(paths, plan, here, self._run.epoch, timeout_s=CONNECT_TIMEOUT_S),
            leaders={stage.pp_rank: stage.leader for stage in plan.stages},
            run=self._run.run,
            epoch=self._run.epoch,
            sender=f"scheduler-{os.getpid()}",
            timeout_s=kv.commit_timeout_s,
            sockets={
                stage.pp_rank: paths.peer_socket(stage.pp_rank) for stage in plan.stages if stage.node_rank == here
            },
            secret=load_secret(paths.secret, {}) if plan.nnodes > 1 else None,
        )
        self._manager = KVCacheManager(
            world_size=plan.world_size,
            settings=settings_of(kv, self._run.fault),
            channel=channel,
            wake=self._wake,
        )
        block_bytes = max(rank.kv_bytes_per_block for rank in plan.ranks)
        self._pool = ElasticBlockPool(
            *args,
            manager=self._manager,
            cache_keep_blocks=kv.cache_keep_bytes // block_bytes,
            cache_idle_s=kv.cache_idle_s,
            **kwargs,
        )
        if self._pool.num_gpu_blocks != kv.num_blocks:
            raise CompatibilityError(
                f"vLLM made {self._pool.num_gpu_blocks} KV blocks where the plan has {kv.num_blocks}."
            )
        return self._pool

    def _attach(self, core: Any) -> None:
        """Follow the scheduler of a finished engine core, from its own thread."""
        scheduler = core.scheduler
        manager, pool = self._manager, self._pool
        if manager is None or pool is None or scheduler.kv_cache_manager.block_pool is not pool:
            raise CompatibilityError("vLLM's scheduler did not take the elastic block pool: its blocks have no memory.")
        self._core = core
        coordinator = compat.seam(scheduler.kv_cache_manager, "coordinator")
        count, schedule, update = (
            compat.seam(coordinator, "get_num_blocks_to_allocate"),
            compat.seam(scheduler, "schedule"),
            compat.seam(scheduler, "update_from_output"),
        )
        shutdown = compat.seam(core, "shutdown")

        def count_and_map(*args: Any, **kwargs: Any) -> int:
            wanted: int = count(*args, **kwargs)
            if wanted > 0:
                pool.ensure(wanted)
            return wanted

        def schedule_step(*args: Any, **kwargs: Any) -> Any:
            if self._next_trim is not None and time.monotonic() >= self._next_trim:
                self._trim()
            # Counted first, so that what this very call frees waits for the step too.
            manager.step_scheduled()
            return schedule(*args, **kwargs)

        def finish_step(*args: Any, **kwargs: Any) -> Any:
            # vLLM gets here when the last stage's result is in. Every rank of every stage took part in it, so this
            # step touches no block any more; what its requests free now waits for the steps behind it only.
            outputs = update(*args, **kwargs)
            manager.step_finished()
            self._expect_trim()
            return outputs

        def close_and_shutdown() -> None:
            manager.close()
            shutdown()

        coordinator.get_num_blocks_to_allocate = count_and_map
        scheduler.schedule = schedule_step
        scheduler.update_from_output = finish_step
        core.shutdown = close_and_shutdown
        manager.start()

    def _wake(self) -> None:
        """Called from the manager's thread: have the scheduler's thread, maybe asleep, call `_tick`."""
        if self._core is None or self._tick_asked:
            return
        from vllm.v1.engine import EngineCoreRequestType

        self._tick_asked = True
        self._core._idle_state_callbacks.append(self._tick)
        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _tick(self, _core: Any) -> None:
        """On the scheduler's thread while it has nothing to do."""
        self._tick_asked = False
        self._trim()
        if self._manager is not None:
            self._manager.tick()
            self._stats.tell(self._manager)

    def _trim(self) -> None:
        if self._pool is not None:
            self._next_trim = self._pool.trim_cache()
            if self._manager is not None:
                self._manager.wake_at(self._next_trim)

    def _expect_trim(self) -> None:
        if self._next_trim is None:
            self._trim()
