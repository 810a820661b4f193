"""One rank of SGLang: its scheduler, its KV pool, and the manager of the pool's memory."""

from __future__ import annotations

import dataclasses
import logging
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


class RankHooks:
    """What the process of one rank carries beside SGLang's own.

    The ranks schedule in step, each for itself, so each has a KVCacheManager of its own memory. Nothing here may make
    them differ in what SGLang counts.
    """

    def __init__(self, run: RunEnv, plan: LaunchPlan, rank: RankPlan) -> None:
        self._run = run
        self._plan = plan
        self._rank = rank
        first = rank.pp_rank == 0 and rank.tp_rank == 0  # the one that receives the requests for all
        self._limits = LimitBox() if first else None
        self._stats = StatsFile(RunPaths(run.run_dir)) if first else None
        self._kv = RankKV(run, plan, rank, commits=False, on_limit=self._limits.put if self._limits else None)
        self._failures = FailureRecorder.of_rank(RunPaths(run.run_dir), rank)
        self._manager: KVCacheManager | None = None
        self._blocks: Blocks | None = None
        self._trimmer: Trimmer | None = None

    def install(self) -> None:
        """Raises CompatibilityError, after recording it, where SGLang is not what the adapter knows."""
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
        if self._manager is not None:
            self._manager.close()
        self._kv.close()

    def _install_elastic(self) -> None:
        from kvlaunch.engines.sglang.allocators import ElasticPagedAllocator, ElasticTokenAllocator

        compat.hook(
            {
                f"{MEM_CACHE}.kv_cache_configurator.KVCacheConfigurator._apply_token_constraints": (
                    "replace",
                    self._capacity,
                ),
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
        """See that the scheduler works with the elastic pool."""
        from kvlaunch.engines.sglang.allocators import ElasticPagedAllocator, ElasticTokenAllocator, blocks_of

        allocator = scheduler.token_to_kv_pool_allocator
        if type(allocator) not in (ElasticTokenAllocator, ElasticPagedAllocator):
            raise CompatibilityError(
                f"SGLang's allocator ({type(allocator).__name__}) does not work with kv=elastic yet.",
                hint="Start with kv=static.",
            )
        if blocks_of(allocator.get_kvcache()).manager is not self._manager:
            raise CompatibilityError("SGLang's allocator is not that of the elastic pool: its slots have no memory.")
        if scheduler.max_total_num_tokens != capacity_tokens(self._plan.kv):
            raise CompatibilityError(
                f"SGLang counts {scheduler.max_total_num_tokens} KV slots where the plan has "
                f"{capacity_tokens(self._plan.kv)}."
            )
        if self._limits is not None:
            kv, manager = self._plan.kv, self._manager
            page_tokens = kv.blocks_per_page * kv.block_size
            self._trimmer = Trimmer(
                keep_tokens=kv.cache_keep_bytes // max(rank.kv_bytes_per_token for rank in self._plan.ranks),
                idle_s=kv.cache_idle_s,
                evictable=scheduler.tree_cache.evictable_size,
                over_limit=lambda: manager.pages_held_over_limit * page_tokens,
            )

    def _capacity(self, _configurator: Any, _token_capacity: int) -> int:
        """Slots of address space. What memory is free at the start limits nothing."""
        return capacity_tokens(self._plan.kv)

    def _create_buffers(self, kv_pool: Any) -> None:
        from kvlaunch.engines.sglang.allocators import Blocks

        pool.create_buffers(kv_pool, self._kv)
        assert self._kv.memory is not None  # create_buffers has made it
        self._manager = KVCacheManager(
            world_size=1,
            settings=settings_of(self._plan.kv, self._run.fault, limit_binds=False),
            channel=LocalChannel(self._kv.memory),
            wake=_no_wake,
        )
        self._manager.start()
        self._blocks = kv_pool.kvlaunch_blocks = Blocks(self._manager, self._rank.global_rank)

    def _run_batch(self, run: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._manager is not None:
            self._manager.step_scheduled()
        return run(scheduler, *args, **kwargs)

    def _process_batch_result(self, process: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
        """SGLang gets here when the step's result is in: this rank's part of it has long been done."""
        process(scheduler, batch, result)
        if self._manager is not None:
            self._manager.step_finished()
        if self._trimmer is not None:
            self._trimmer.requests_ended([req for req in batch.reqs if req.finished()])

    def _on_idle(self, _scheduler: Any) -> None:
        if self._manager is not None:
            self._manager.tick()
            if self._stats is not None:
                self._stats.tell(self._manager)

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
        assert self._blocks is not None  # orders come to a scheduler that works with the elastic pool
        self._blocks.set_limit(pages)
        self._kv.limited(pages)
        log.info("KV limit: %s pages", "all" if pages is None else pages)
        return -self._blocks.available * self._plan.kv.block_size

    def _count_withheld(self, count: Callable[[Any], Any], observer: Any) -> Any:
        """SGLang's leak check adds up what is available and what is used: slots beyond the limit are neither."""
        stats = count(observer)
        assert self._blocks is not None
        withheld = self._blocks.withheld * self._plan.kv.block_size
        if not withheld:
            return stats
        used = stats.full_num_used - withheld
        return dataclasses.replace(
            stats,
            full_num_used=used,
            full_token_usage=used / stats.full_capacity,
            full_available_size=stats.full_available_size + withheld,
        )


def _no_wake() -> None:
    """An idle scheduler turns its loop at least once a second, and calls `tick` at each turn."""
