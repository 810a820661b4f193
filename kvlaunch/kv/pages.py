"""Which pages are mapped and which blocks in them are free: the data behind the KVCacheManager, without any I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from heapq import heappop, heappush


class PageState(IntEnum):
    """Where a page stands."""

    UNMAPPED = 0
    """Address space only. Next: MAPPING."""
    MAPPING = 1
    """The ranks are putting memory behind it. Next: MAPPED, or UNMAPPED where that failed."""
    MAPPED = 2
    """In service: its blocks are handed out. Next: RETIRING, once all its blocks are free."""
    RETIRING = 3
    """Out of service, memory still there; waits for steps in flight. Next: MAPPED (reclaimed) or UNMAPPING."""
    UNMAPPING = 4
    """The ranks are giving its memory back. Next: UNMAPPED."""


class PagePool:
    """Pages, their states, and the free blocks of those that are MAPPED. For one thread; does no I/O.

    Block b lies in page b // blocks_per_page. Page 0 holds the null block 0, which is never handed out: page 0 is
    always MAPPED, and its other blocks are used like any.

    Blocks come from the fullest pages first (fewest free blocks), among equally full ones from the page of lowest
    index; pages are mapped from the lowest index up and retired from the highest down. So pages empty, and the
    address space in use stays compact.

    The cost of every method is amortised O(log pages) a page and O(1) a block; the counts are plain attributes.

    Args:
        num_blocks: blocks of address space, block 0 included.
        blocks_per_page: blocks in a page; divides num_blocks.
    """

    # How it works: for each level (number of free blocks) there is a heap of pages. A page that changes its level is
    # pushed onto its new heap and left behind in the old one, where it is dropped when it comes to the top. `_filed`
    # says which (page, level) lie in a heap, so that nothing lies there twice and the heaps stay bounded.

    def __init__(self, num_blocks: int, blocks_per_page: int) -> None:
        if blocks_per_page < 1 or num_blocks < 1 or num_blocks % blocks_per_page:
            raise ValueError(f"num_blocks={num_blocks} is no positive multiple of blocks_per_page={blocks_per_page}")
        self.num_blocks = num_blocks
        self.blocks_per_page = blocks_per_page
        self.num_pages = num_blocks // blocks_per_page

        self.free_blocks = 0
        """Free blocks in MAPPED pages: what `take` can hand out."""
        self.in_use_blocks = 0
        """Blocks handed out and not given back."""
        self.empty_pages = 0
        """MAPPED pages all of whose blocks are free; page 0 never counts."""
        self.touched_pages = 1
        """Pages that were MAPPED at any time so far."""
        self.mapping_pages = 0
        self.unmapping_pages = 0

        self._state = bytearray(self.num_pages)
        self._touched = bytearray(self.num_pages)
        self._in_use = bytearray(num_blocks)
        self._free: dict[int, list[int]] = {}  # MAPPED page -> its free blocks, handed out from the end
        self._unmapped = list(range(1, self.num_pages))  # heap; holds each UNMAPPED page once
        self._retiring: OrderedDict[int, int] = OrderedDict()  # RETIRING page -> epoch, which never decreases
        self._heaps: list[list[int]] = [[] for _ in range(blocks_per_page + 1)]
        self._levels = 0  # bit l: heap l is not empty
        self._filed = bytearray(self.num_pages * (blocks_per_page + 1))
        self._tail: list[int] = []  # heap of -page over empty pages, for retiring from the highest down
        self._in_tail = bytearray(self.num_pages)

        self._state[0] = PageState.MAPPED
        self._touched[0] = 1
        self._serve(0, first_block=1)

    @property
    def mapped_pages(self) -> int:
        """Pages in service (MAPPED), page 0 included."""
        return len(self._free)

    @property
    def retiring_pages(self) -> int:
        return len(self._retiring)

    @property
    def unmapped_pages(self) -> int:
        return len(self._unmapped)

    @property
    def committed_pages(self) -> int:
        """Pages that have memory or are getting it: all but the UNMAPPED ones."""
        return self.num_pages - len(self._unmapped)

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def is_in_use(self, block_id: int) -> bool:
        """Whether the block is handed out."""
        return bool(self._in_use[block_id])

    def in_use(self) -> list[int]:
        """The blocks that are handed out, ascending. O(num_blocks)."""
        found, block_id = [], self._in_use.find(1)
        while block_id >= 0:
            found.append(block_id)
            block_id = self._in_use.find(1, block_id + 1)
        return found

    def take(self, n: int) -> list[int]:
        """Hand out n blocks.

        Raises:
            ValueError: fewer than n blocks are free in mapped pages; nothing was handed out.
        """
        if not 0 <= n <= self.free_blocks:
            raise ValueError(f"asked for {n} blocks, but {self.free_blocks} are free in mapped pages")
        taken: list[int] = []
        left = n
        while left:
            level = self._lowest_level()
            page = heappop(self._heaps[level])
            self._filed[page * (self.blocks_per_page + 1) + level] = 0
            free = self._free[page]
            if level == self.blocks_per_page:
                self.empty_pages -= 1
            if level <= left:
                free.reverse()
                taken += free
                free.clear()
                left -= level
            else:
                taken += free[: -left - 1 : -1]
                del free[-left:]
                self._file(page, level - left)
                left = 0
        in_use = self._in_use
        for block_id in taken:
            in_use[block_id] = 1
        self.free_blocks -= n
        self.in_use_blocks += n
        return taken

    def give(self, block_ids: Sequence[int]) -> None:
        """Take blocks back that were handed out.

        Raises:
            ValueError: a block is not handed out (freed twice, in an unmapped page, the null block, out of range);
                the message names it, and no block was taken back.
        """
        in_use, free, size = self._in_use, self._free, self.blocks_per_page
        touched: set[int] = set()
        for done, block_id in enumerate(block_ids):
            if block_id < 0 or block_id >= self.num_blocks or not in_use[block_id]:
                self._undo_give(block_ids[:done])
                raise ValueError(self._why_not(block_id))
            in_use[block_id] = 0
            page = block_id // size
            free[page].append(block_id)
            touched.add(page)
        for page in touched:
            level = len(free[page])
            self._file(page, level)
            if level == size:
                self._became_empty(page)
        self.free_blocks += len(block_ids)
        self.in_use_blocks -= len(block_ids)

    def begin_map(self, n: int) -> list[int]:
        """Choose up to n UNMAPPED pages, lowest first; they are MAPPING now. Ascending."""
        pages = [heappop(self._unmapped) for _ in range(min(n, len(self._unmapped)))]
        for page in pages:
            self._state[page] = PageState.MAPPING
        self.mapping_pages += len(pages)
        return pages

    def finish_map(self, pages: Sequence[int]) -> None:
        """These MAPPING pages are mapped on every rank: put them into service."""
        self._move(pages, PageState.MAPPING, PageState.MAPPED)
        self.mapping_pages -= len(pages)
        for page in pages:
            self.touched_pages += not self._touched[page]
            self._touched[page] = 1
            self._serve(page)

    def abort_map(self, pages: Sequence[int]) -> None:
        """These MAPPING pages could not be mapped: they are UNMAPPED again."""
        self._move(pages, PageState.MAPPING, PageState.UNMAPPED)
        self.mapping_pages -= len(pages)
        for page in pages:
            heappush(self._unmapped, page)

    def retire(self, n: int, epoch: int) -> int:
        """Take up to n empty pages out of service, highest first; they wait for `epoch`. Returns how many.

        Args:
            epoch: steps scheduled so far (StepClock.scheduled). Must not be less than in an earlier call.
        """
        size, retired = self.blocks_per_page, 0
        while retired < n and self._tail:
            page = -heappop(self._tail)
            self._in_tail[page] = 0
            free = self._free.get(page)
            if free is None or len(free) != size:
                continue
            del self._free[page]
            self._state[page] = PageState.RETIRING
            self._retiring[page] = epoch
            retired += 1
        self.empty_pages -= retired
        self.free_blocks -= retired * size
        return retired

    def reclaim(self, n: int) -> int:
        """Put up to n RETIRING pages back into service, those retired last first. Returns how many."""
        count = min(n, len(self._retiring))
        for _ in range(count):
            page, _epoch = self._retiring.popitem()
            self._state[page] = PageState.MAPPED
            self._serve(page)
        return max(count, 0)

    def release(self, finished: int) -> list[int]:
        """The RETIRING pages whose epoch is at most `finished`; they are UNMAPPING now."""
        pages: list[int] = []
        while self._retiring:
            page, epoch = self._retiring.popitem(last=False)
            if epoch > finished:
                self._retiring[page] = epoch
                self._retiring.move_to_end(page, last=False)
                break
            self._state[page] = PageState.UNMAPPING
            pages.append(page)
        self.unmapping_pages += len(pages)
        return pages

    def finish_unmap(self, pages: Sequence[int]) -> None:
        """These UNMAPPING pages have no memory any more on any rank: they are UNMAPPED."""
        self._move(pages, PageState.UNMAPPING, PageState.UNMAPPED)
        self.unmapping_pages -= len(pages)
        for page in pages:
            heappush(self._unmapped, page)

    def _serve(self, page: int, first_block: int | None = None) -> None:
        start = page * self.blocks_per_page
        free = list(range(start + self.blocks_per_page - 1, (start if first_block is None else first_block) - 1, -1))
        self._free[page] = free
        self.free_blocks += len(free)
        if free:
            self._file(page, len(free))
        if len(free) == self.blocks_per_page:
            self._became_empty(page)

    def _file(self, page: int, level: int) -> None:
        key = page * (self.blocks_per_page + 1) + level
        if not self._filed[key]:
            self._filed[key] = 1
            heappush(self._heaps[level], page)
            self._levels |= 1 << level

    def _became_empty(self, page: int) -> None:
        self.empty_pages += 1
        if not self._in_tail[page]:
            self._in_tail[page] = 1
            heappush(self._tail, -page)

    def _lowest_level(self) -> int:
        """The least number of free blocks of any page that has some; the page to take from tops that heap."""
        free, levels = self._free, self._levels
        while True:
            level = (levels & -levels).bit_length() - 1
            heap = self._heaps[level]
            while heap:
                page = heap[0]
                blocks = free.get(page)
                if blocks is not None and len(blocks) == level:
                    return level
                heappop(heap)
                self._filed[page * (self.blocks_per_page + 1) + level] = 0
            levels ^= 1 << level
            self._levels = levels

    def _move(self, pages: Sequence[int], old: PageState, new: PageState) -> None:
        for page in pages:
            if self._state[page] != old:
                raise ValueError(
                    f"page {page} is {self.state(page).name}; only a page that is {old.name} can be {new.name}"
                )
        for page in pages:
            self._state[page] = new

    def _undo_give(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._in_use[block_id] = 1
            self._free[block_id // self.blocks_per_page].pop()

    def _why_not(self, block_id: int) -> str:
        if not 0 <= block_id < self.num_blocks:
            return f"block {block_id} was freed, but blocks are 0 to {self.num_blocks - 1}"
        if block_id == 0:
            return "block 0 was freed, but it is the null block, which is never handed out"
        page = block_id // self.blocks_per_page
        state = self.state(page)
        if state is not PageState.MAPPED:
            return f"block {block_id} was freed, but its page {page} is {state.name}"
        return f"block {block_id} of page {page} was freed, but it is free already"
