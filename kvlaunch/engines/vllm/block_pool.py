"""vLLM's BlockPool with blocks that exist only while memory is behind them.

Free blocks without a prefix-cache hash live in the KVCacheManager; vLLM's own free queue holds the cached ones alone,
in its own order of eviction. Hashing, prefix lookup and eviction stay vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvlaunch.kv.manager import KVCacheManager


class ElasticBlockPool(BlockPool):  # type: ignore[misc]
    """Args beside BlockPool's own:

    manager: maps pages and hands out their blocks. Its thread is the scheduler's, like this pool's.
    cache_keep_blocks: cached blocks, in no request's use, that stay however long they idle.
    cache_idle_s: seconds after which the others go back.
    """

    def __init__(
        self,
        *args: Any,
        manager: KVCacheManager,
        cache_keep_blocks: int,
        cache_idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = None
        self.free_block_queue = FreeKVCacheBlockQueue([])
        self._manager = manager
        self._keep = cache_keep_blocks
        self._idle_s = cache_idle_s
        self._clock = clock
        self._cached_at: dict[int, float] = {}
        self._count_all = False

    def ensure(self, num_blocks: int) -> None:
        """Get memory behind `num_blocks` blocks if there is any to have.

        Called before vLLM counts what is free: afterwards `get_num_free_blocks` promises only what can be kept.
        """
        self._manager.ensure(num_blocks)

    def get_num_free_blocks(self) -> int:
        cached: int = self.free_block_queue.num_free_blocks
        if self._count_all:
            return int(self.num_gpu_blocks) - 1 - self._manager.in_use_blocks + cached
        return self._manager.free_blocks + cached

    def get_usage(self) -> float:
        with self._counting_all():
            return float(super().get_usage())

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > 0:
            ready = min(self._manager.ensure(num_blocks), num_blocks)
            taken = [self.blocks[i] for i in self._manager.take(ready)]
            self.free_block_queue.prepend_n(taken)
        blocks: list[KVCacheBlock] = super().get_new_blocks(num_blocks)
        for block in blocks:
            self._cached_at.pop(block.block_id, None)
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        now = self._clock()
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null and block.block_hash is not None:
                self._cached_at[block.block_id] = now
        self._surrender()

    def evict_blocks(self, block_ids: set[int]) -> None:
        super().evict_blocks(block_ids)
        queue = self.free_block_queue
        idle = [b for b in (self.blocks[i] for i in block_ids) if b.ref_cnt == 0 and b.next_free_block is not None]
        for block in idle:
            queue.remove(block)
        self._give(idle)

    def reset_prefix_cache(self) -> bool:
        with self._counting_all():
            done = bool(super().reset_prefix_cache())
        if done:
            self._give(self.free_block_queue.popleft_n(self.free_block_queue.num_free_blocks))
        return done

    def trim_cache(self) -> float | None:
        """Give back cached blocks that have idled too long, least recently used first.

        Returns:
            Time on the pool's clock at which it should be called next, or None where nothing will be due. It leaves
            time for several blocks to become due, so that their pages go together.
        """
        queue, due = self.free_block_queue, self._clock() - self._idle_s
        old: list[KVCacheBlock] = []
        while queue.num_free_blocks > self._keep:
            head = queue.fake_free_list_head.next_free_block
            freed_at = self._cached_at.get(head.block_id, 0.0)
            if freed_at > due:
                self._give(old)
                return freed_at + self._idle_s + min(1.0, self._idle_s / 10)
            queue.popleft()
            self._maybe_evict_cached_block(head)
            old.append(head)
        self._give(old)
        return None

    def _surrender(self) -> None:
        """Pass free blocks without a hash, which BlockPool puts at the head of its queue, to the manager."""
        queue = self.free_block_queue
        plain: list[KVCacheBlock] = []
        while queue.num_free_blocks:
            head = queue.fake_free_list_head.next_free_block
            if self.enable_caching and head.block_hash is not None:
                break
            plain.append(queue.popleft())
        self._give(plain)

    def _give(self, blocks: list[KVCacheBlock]) -> None:
        if not blocks:
            return
        for block in blocks:
            self._cached_at.pop(block.block_id, None)
        self._manager.give([block.block_id for block in blocks])

    @contextmanager
    def _counting_all(self) -> Iterator[None]:
        """Count blocks without memory as free too: what is in use does not depend on what could be mapped now."""
        self._count_all = True
        try:
            yield
        finally:
            self._count_all = False
