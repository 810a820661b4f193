"""SGLang's slot allocators with slots that exist only while memory is behind them.

What SGLang counts as available is what is not handed out, whether or not there is memory behind it yet: that number is
the same on every rank at the same step, and only the order of slots and the mapped pages are a rank's own. A rank that
cannot map what it counted on ends the engine.

A limit makes that number smaller, below zero where more is in use: then SGLang evicts, admits nothing and retracts
until it is kept. Two are served beyond it while there is address space, where stock SGLang would end or fail a request:
the next chunk of a prefill under way, and the last request of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

from kvlaunch.errors import CompatibilityError, KVCommitError
from kvlaunch.kv.manager import KVCacheManager

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


class Blocks:
    """The blocks of one rank, as its allocator sees them.

    Args:
        manager: maps pages and hands out their blocks. Its owner thread is the scheduler's.
        global_rank: named where there is no memory.
    """

    def __init__(self, manager: KVCacheManager, global_rank: int) -> None:
        self.manager = manager
        self._global_rank = global_rank
        self._limit = self._all = manager.settings.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that may be handed out under the limit; negative where more are in use. Block 0 never counts."""
        return self._limit - self.manager.in_use_blocks

    @property
    def withheld(self) -> int:
        """Blocks that exist and that the limit keeps from use."""
        return self._all - self._limit

    def fits(self, n: int) -> bool:
        """Whether n more can be handed out at all, past the limit or not."""
        return n <= self._all - self.manager.in_use_blocks

    def set_limit(self, pages: int | None) -> None:
        """Use the blocks of so many pages only, page 0 included; None: of all. At least 1."""
        self.manager.set_limit(pages)
        blocks = self._all if pages is None else pages * self.manager.settings.blocks_per_page - 1
        self._limit = min(blocks, self._all)

    def take(self, n: int) -> torch.Tensor:
        """Hand out n blocks of those that fit, by number (int64).

        Raises:
            KVCommitError: no memory for them.
        """
        if self.manager.ensure(n) < n:
            error = self.manager.last_error
            raise KVCommitError(
                f"Rank {self._global_rank} has no memory for {n} more KV blocks"
                + (f": {error.message}" if error is not None else "."),
                failures={self._global_rank: error.message if error is not None else "no memory"},
                hint="SGLang's ranks schedule in step, so the engine cannot go on. Use less kv.reserve.",
            )
        return torch.tensor(self.manager.take(n), dtype=torch.int64)

    def give(self, block_ids: torch.Tensor) -> None:
        self.manager.give(block_ids.tolist())


def blocks_of(pool: KVCache) -> Blocks:
    """The blocks of a pool that `pool.create_buffers` made.

    Raises:
        CompatibilityError: SGLang made this pool by itself.
    """
    blocks = getattr(pool, "kvlaunch_blocks", None)
    if not isinstance(blocks, Blocks):
        raise CompatibilityError(
            f"SGLang made a KV pool ({type(pool).__name__}) that does not work with kv=elastic yet.",
            hint="Start with kv=static.",
        )
    return blocks


def parts_of(allocator: Any) -> list[Any]:
    """The allocators of a rank's pools: the two inside SGLang's allocator for full and sliding-window attention, or the
    only one.

    Raises:
        CompatibilityError: one of them is not elastic.
    """
    both = type(allocator) is SWATokenToKVPoolAllocator and not allocator.swa_req_ring
    parts = [allocator.full_attn_allocator, allocator.swa_attn_allocator] if both else [allocator]
    for part in parts:
        if type(part) not in (ElasticTokenAllocator, ElasticPagedAllocator):
            raise CompatibilityError(
                f"SGLang's allocator ({type(part).__name__}) does not work with kv=elastic yet.",
                hint="Start with kv=static.",
            )
    return parts


class _LastGoesOn:
    """The last request of a batch is decoded past the limit, where there are blocks for it: else it would be failed."""

    _blocks: Blocks
    page_size: int

    def check_decode_capacity(self, *, num_tokens: int, tree_cache: Any, requests: Any = None, **others: Any) -> bool:
        enough: bool = super().check_decode_capacity(  # type: ignore[misc]  # SGLang's, which comes behind
            num_tokens=num_tokens, tree_cache=tree_cache, requests=requests, **others
        )
        alone = requests is not None and len(requests) == 1
        return enough or (alone and self._blocks.fits(-(-num_tokens // int(self.page_size))))


class ElasticTokenAllocator(_LastGoesOn, TokenToKVPoolAllocator):  # type: ignore[misc]
    """For page_size 1: a block is a slot."""

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: KVCache, need_sort: bool) -> None:
        self._blocks = blocks_of(kvcache)
        super().__init__(size, dtype, device, kvcache, need_sort)

    def clear(self) -> None:
        self.free_group = None
        self._blocks.manager.give_all()

    def available_size(self) -> int:
        return self._blocks.available

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self._blocks.take(need_size) if self._blocks.fits(need_size) else None

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self._blocks.give(free_index)
        else:
            self.free_group.append(self._copy_for_free_group(free_index))


class ElasticPagedAllocator(_LastGoesOn, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """For page_size > 1: a block is a page of SGLang.

    SGLang's own methods cut slots out of `free_pages`; here that holds, while one of them runs, exactly the blocks that
    it is about to use.
    """

    def __init__(  # noqa: PLR0917 - the parameters are SGLang's
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: KVCache, need_sort: bool
    ) -> None:
        self._blocks = blocks_of(kvcache)
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)

    def clear(self) -> None:
        super().clear()
        self._blocks.manager.give_all()
        self.free_pages = _NO_PAGES

    def available_size(self) -> int:
        return self._blocks.available * int(self.page_size)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self._fetch(need_size // self.page_size):
            return None
        slots: torch.Tensor | None = super().alloc(need_size)
        return slots

    def alloc_extend(  # noqa: PLR0917 - the parameters are SGLang's
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        wanted = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        if not self._fetch(wanted):
            return None
        slots: torch.Tensor | None = super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, wanted
        )
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if not self._fetch(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)):
            return None
        slots: torch.Tensor | None = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return slots

    def _fetch(self, num_pages: int) -> bool:
        if not self._blocks.fits(num_pages):
            return False
        self.free_pages = self._blocks.take(num_pages) if num_pages else _NO_PAGES
        return True

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        self._blocks.give(torch.cat(page_ids))


_NO_PAGES = torch.empty(0, dtype=torch.int64)
