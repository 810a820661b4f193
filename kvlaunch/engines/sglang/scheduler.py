"""One rank of SGLang: its scheduler, its KV pools, and the managers of their memory."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlaunch.engines.process import FailureRecorder
from kvlaunch.engines.rank_kv import RankKV, settings_of
from kvlaunch.engines.sglang import compat, pool
from kvlaunch.engines.sglang.orders import Limit, LimitBox, Order, Trimmer
from kvlaunch.engines.stats_file import StatsFile
from kvlaunch.env import RunEnv
from kvlaunch.errors import CompatibilityError
from kvlaunch.kv.ipc.local import LocalChannel
from kvlaunch.kv.manager import KVCacheManager
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.kv import capacity_tokens
from kvlaunch.plan.types import LaunchPlan, RankPlan

if TYPE_CHECKING:
    from kvlaunch.engines.sglang.allocators import Blocks

log = logging.getLogger("kvlaunch.sglang")

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
STATS = "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
MEM_CACHE = "sglang.srt.mem_cache"
SLIDING_BY_REQUESTS = "sglang.srt.model_executor.pool_configurator.SWARequestCapPoolConfigurator"


class RankHooks:
    """What the process of one rank carries beside SGLang's own.

    The ranks schedule in step, each for itself, so each has a KVCacheManager of its own memory: one for each of its
    pools. Nothing here may make them differ in what SGLang counts.
    """

    def __init__(self, run: RunEnv, plan: LaunchPlan, rank: RankPlan) -> None:
        self._run = run
        self._plan = plan
        self._rank = rank
        first = rank.pp_rank == 0 and rank.tp_rank == 0  # the one that receives the requests for all
        self._limits = LimitBox() if first else None
        self._stats = StatsFile(RunPaths(run.run_dir)) if first else None
        self._kv = RankKV(run, plan, rank, commits=False, on_limit=self._put_limit if self._limits else None)
        self._failures = FailureRecorder.of_rank(RunPaths(run.run_dir), rank)
        self._pools: list[Blocks] = []  # in the order in which SGLang makes them
        self._trimmer: Trimmer | None = None

    def install(self) -> None:
        """Raises CompatibilityError, after recording it, where SGLang is not what the adapter knows."""
        _keep_progress_bars_to_this_process()
        try:
            compat.hook(
                {
                    f"{SCHEDULER}.__init__": ("around", self._make_scheduler),
                    f"{SCHEDULER}.run_event_loop": ("around", self._run_event_loop),
                    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": ("after", self._loaded),
                }
            )
            if self._plan.kv.mode == "elastic":
                self._install_elastic()
        except CompatibilityError as error:
            self._failures.record(error)
            raise

    def close(self) -> None:
        for kv_pool in self._pools:
            kv_pool.manager.close()
        self._kv.close()

    def _install_elastic(self) -> None:
        from kvlaunch.engines.sglang import attention
        from kvlaunch.engines.sglang.allocators import ElasticPagedAllocator, ElasticTokenAllocator

        compat.hook(
            {
                **attention.hooks(),
                f"{MEM_CACHE}.kv_cache_configurator.KVCacheConfigurator._apply_token_constraints": (
                    "replace",
                    self._capacity,
                ),
                # A pool for a sliding window as large as the plan says, whatever number of requests is the most.
                f"{SLIDING_BY_REQUESTS}.is_applicable": ("replace", _never),
                f"{MEM_CACHE}.memory_pool.MHATokenToKVPool._create_buffers_normal": ("replace", self._create_buffers),
                f"{MEM_CACHE}.allocator.token.TokenToKVPoolAllocator": ("replace", ElasticTokenAllocator),
                f"{MEM_CACHE}.allocator.paged.PagedTokenToKVPoolAllocator": ("replace", ElasticPagedAllocator),
                f"{SCHEDULER}.run_batch": ("around", self._run_batch),
                f"{SCHEDULER}.process_batch_result": ("around", self._process_batch_result),
                f"{SCHEDULER}.on_idle": ("before", self._on_idle),
                f"{SCHEDULER}.process_input_requests": ("before", self._take_orders),
                f"{RECEIVER}._pull_raw_reqs": ("after", self._add_orders),
                f"{STATS}._get_token_info": ("around", self._count_withheld),
            }
        )

    def _make_scheduler(self, init: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(scheduler, *args, **kwargs)
            self._check_rank()
            if self._plan.kv.mode == "elastic":
                self._attach(scheduler)
        except Exception as error:
            self._failures.record(error)
            raise
        self._kv.tell_memory()

    def _run_event_loop(self, run: Callable[[Any], None], scheduler: Any) -> None:
        try:
            run(scheduler)
        except Exception as error:
            self._failures.record(error)
            raise

    def _loaded(self, _result: Any, *_args: Any, **_kwargs: Any) -> None:
        self._kv.weights_loaded()

    def _check_rank(self) -> None:
        """Raises CompatibilityError where SGLang placed this rank otherwise than the plan."""
        from sglang.srt.runtime_context import get_parallel

        found = (get_parallel().pp_rank, get_parallel().tp_rank)
        planned = (self._rank.pp_rank, self._rank.tp_rank)
        if found != planned:
            raise CompatibilityError(
                f"SGLang made global rank {self._rank.global_rank} (stage, tp rank) {found}; the plan has {planned}."
            )

    def _attach(self, scheduler: Any) -> None:
        """See that the scheduler works with the elastic pools."""
        from kvlaunch.engines.sglang import attention
        from kvlaunch.engines.sglang.allocators import blocks_of, parts_of

        parts = parts_of(scheduler.token_to_kv_pool_allocator)
        if len(parts) > 1:
            attention.check(scheduler.tp_worker.model_runner.attn_backend)
        if [blocks_of(part.get_kvcache()) for part in parts] != self._pools:
            raise CompatibilityError("SGLang's allocator is not that of the elastic pools: its slots have no memory.")
        if scheduler.max_total_num_tokens != capacity_tokens(self._plan.kv):
            raise CompatibilityError(
                f"SGLang counts {scheduler.max_total_num_tokens} KV slots where the plan has "
                f"{capacity_tokens(self._plan.kv)}."
            )
        if self._limits is not None:
            kv, manager, tree = self._plan.kv, self._pools[0].manager, scheduler.tree_cache
            page_tokens = kv.blocks_per_page * kv.block_size
            self._trimmer = Trimmer(
                keep_tokens=kv.cache_keep_bytes // max(rank.kv_bytes_per_token for rank in self._plan.ranks),
                idle_s=kv.cache_idle_s,
                # Tokens that leave the pool for full attention leave the other one too, if they are there at all.
                evictable=tree.full_evictable_size if len(parts) > 1 else tree.evictable_size,
                over_limit=lambda: manager.pages_held_over_limit * page_tokens,
            )

    def _capacity(self, _configurator: Any, _token_capacity: int) -> int:
        """Slots of address space. What memory is free at the start limits nothing."""
        return capacity_tokens(self._plan.kv)

    def _create_buffers(self, kv_pool: Any) -> None:
        from kvlaunch.engines.sglang.allocators import Blocks

        manager = KVCacheManager(
            world_size=1,
            settings=settings_of(self._plan.kv, self._run.fault, limit_binds=False),
            channel=LocalChannel(pool.create_buffers(kv_pool, self._kv)),
            wake=_no_wake,
        )
        kv_pool.kvlaunch_blocks = Blocks(manager, self._rank.global_rank)
        self._pools.append(kv_pool.kvlaunch_blocks)
        manager.start()

    def _run_batch(self, run: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        for kv_pool in self._pools:
            kv_pool.manager.step_scheduled()
        return run(scheduler, *args, **kwargs)

    def _process_batch_result(self, process: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
        """SGLang gets here when the step's result is in: this rank's part of it has long been done."""
        process(scheduler, batch, result)
        for kv_pool in self._pools:
            kv_pool.manager.step_finished()
        if self._trimmer is not None:
            self._trimmer.requests_ended([req for req in batch.reqs if req.finished()])

    def _on_idle(self, _scheduler: Any) -> None:
        for kv_pool in self._pools:
            kv_pool.manager.tick()
        if self._pools and self._stats is not None:
            self._stats.tell(self._pools[0].manager)

    def _put_limit(self, pages: int | None) -> None:
        """Called by the listener's thread. Raises ValueError for a limit that cannot be kept."""
        if len(self._pools) > 1:
            raise ValueError("a limit is not possible yet where SGLang has a second KV pool, for a sliding window")
        assert self._limits is not None  # there is nobody else whom the listener could tell
        self._limits.put(pages)

    def _add_orders(self, requests: list[Any] | None, _receiver: Any) -> None:
        if requests is None or self._limits is None or self._trimmer is None:
            return
        orders = (self._limits.due(), self._trimmer.due())
        requests.extend(order for order in orders if order is not None)

    def _take_orders(self, scheduler: Any, requests: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        for order in (request for request in requests if isinstance(request, Order)):
            tokens = self._limit_to(order.pages) if isinstance(order, Limit) else order.tokens
            if tokens > 0:
                scheduler.tree_cache.evict(EvictParams(num_tokens=tokens))
        return (scheduler, [request for request in requests if not isinstance(request, Order)]), {}

    def _limit_to(self, pages: int | None) -> int:
        """Take the limit over. Returns the tokens that are in use beyond it."""
        (blocks,) = self._pools  # with two pools no limit is taken
        blocks.set_limit(pages)
        self._kv.limited(pages)
        log.info("KV limit: %s pages", "all" if pages is None else pages)
        return -blocks.available * self._plan.kv.block_size

    def _count_withheld(self, count: Callable[[Any], Any], observer: Any) -> Any:
        """SGLang's leak check adds up what is available and what is used: slots beyond the limit are neither."""
        stats = count(observer)
        withheld = self._pools[0].withheld * self._plan.kv.block_size
        if not withheld:
            return stats
        used = stats.full_num_used - withheld
        return dataclasses.replace(
            stats,
            full_num_used=used,
            full_token_usage=used / stats.full_capacity,
            full_available_size=stats.full_available_size + withheld,
        )


def _keep_progress_bars_to_this_process() -> None:
    """tqdm's own lock is for several processes, a named semaphore, which a rank that is killed would leave behind."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def _never(_configurator: Any) -> bool:
    return False


def _no_wake() -> None:
    """An idle scheduler turns its loop at least once a second, and calls `tick` at each turn."""
