"""From KV blocks to pages to byte ranges.

An engine's KV buffer is a set of strips. In a strip, block b takes the bytes [base + b*stride, base + (b+1)*stride). A
layer-outermost layout has one strip a layer (two where keys and values lie apart); a block-outermost one has a single
strip. A page is a fixed number of blocks, and takes one byte range in every strip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from kvlaunch.errors import CompatibilityError
from kvlaunch.kv.ipc.messages import PageRun

Strip = tuple[int, int]
"""(offset of block 0 in the region, distance from a block to the next), bytes."""


def smallest_page(strides: Iterable[int], granularity: int) -> int:
    """The smallest number of blocks whose bytes are a multiple of the granularity in every strip."""
    return lcm(*(granularity // gcd(stride, granularity) for stride in strides))


def merged_runs(pages: Sequence[PageRun]) -> list[PageRun]:
    """The same pages, ascending, neighbouring runs joined.

    Raises:
        ValueError: a run is empty, starts below 0, or a page is in it twice.
    """
    merged: list[PageRun] = []
    for first, count in pages if len(pages) == 1 else sorted(pages):
        if count <= 0 or first < 0:
            raise ValueError(f"({first}, {count}) is not a run of pages: (first page, number of pages)")
        if merged:
            last_first, last_count = merged[-1]
            end = last_first + last_count
            if end > first:
                raise ValueError(f"page {first} is in the request twice")
            if end == first:
                merged[-1] = (last_first, last_count + count)
                continue
        merged.append((first, count))
    return merged


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Where the blocks of a rank lie in its region. Make it with `from_strips`, which checks."""

    strips: tuple[Strip, ...]
    """Ascending, disjoint."""
    num_blocks: int
    blocks_per_page: int
    granularity: int
    """Bytes."""

    @classmethod
    def from_strips(
        cls, strips: Iterable[Strip], *, num_blocks: int, blocks_per_page: int, granularity: int
    ) -> BlockGeometry:
        """Check a layout; identical strips (layers that share memory) count once.

        Args:
            strips: (base, stride) in bytes of each layer, or the one of all layers.
            num_blocks: blocks in a strip.
            blocks_per_page: blocks in a page.
            granularity: bytes; the memory backend's.

        Raises:
            ValueError: a number that makes no sense in itself.
            CompatibilityError: the layout cannot be cut into such pages; nothing is rounded.
        """
        if min(num_blocks, blocks_per_page, granularity) <= 0:
            raise ValueError(
                f"num_blocks={num_blocks}, blocks_per_page={blocks_per_page}, granularity={granularity}: must all be"
                " positive"
            )
        unique = sorted(set(strips))
        if not unique:
            raise ValueError("a KV layout without strips")
        if num_blocks % blocks_per_page:
            raise CompatibilityError(
                f"num_blocks={num_blocks} is not a multiple of blocks_per_page={blocks_per_page}.",
                hint=f"Use {num_blocks // blocks_per_page * blocks_per_page or blocks_per_page} blocks.",
            )
        fits = smallest_page((stride for _, stride in unique if stride > 0), granularity)
        end = 0
        for i, (base, stride) in enumerate(unique):
            if base < 0 or stride <= 0:
                raise ValueError(f"strip {i}: base={base}, stride={stride}: must be at least 0, and positive")
            if base % granularity:
                raise CompatibilityError(
                    f"The KV strip at byte {base} does not start on a multiple of the granularity, {granularity} bytes."
                )
            if (blocks_per_page * stride) % granularity:
                raise CompatibilityError(
                    f"A page of {blocks_per_page} blocks of {stride} bytes (strip at byte {base}) is not a multiple of"
                    f" the granularity, {granularity} bytes.",
                    hint=f"Use pages of a multiple of {fits} blocks.",
                )
            if base < end:
                raise CompatibilityError(
                    f"The KV strip at byte {base} overlaps the one before it, which ends at byte {end}: blocks of the"
                    " two would share pages."
                )
            end = base + num_blocks * stride
        return cls(tuple(unique), num_blocks, blocks_per_page, granularity)

    @property
    def num_pages(self) -> int:
        return self.num_blocks // self.blocks_per_page

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all strips."""
        return self.blocks_per_page * sum(stride for _, stride in self.strips)

    @property
    def region_bytes(self) -> int:
        """Bytes from the start of the region to the end of the last strip."""
        base, stride = self.strips[-1]
        return base + self.num_blocks * stride

    def page_of(self, block: int) -> int:
        """Raises ValueError where there is no such block."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not one of {self.num_blocks}")
        return block // self.blocks_per_page

    def blocks_of(self, page: int) -> range:
        """Raises ValueError where there is no such page."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not one of {self.num_pages}")
        return range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)

    def ranges(self, pages: Sequence[PageRun]) -> list[tuple[int, int]]:
        """(offset, number of bytes) of everything that these pages take, ascending, neighbours joined.

        Raises:
            ValueError: no such page, or a page is given twice.
        """
        return self.merged_ranges(merged_runs(pages))

    def merged_ranges(self, runs: Sequence[PageRun]) -> list[tuple[int, int]]:
        """The same for runs that come from `merged_runs`."""
        if runs and runs[-1][0] + runs[-1][1] > self.num_blocks // self.blocks_per_page:
            raise ValueError(f"page {runs[-1][0] + runs[-1][1] - 1} is not one of {self.num_pages}")
        out: list[tuple[int, int]] = []
        last_end = -1
        for base, stride in self.strips:
            page_bytes = self.blocks_per_page * stride
            for first, count in runs:
                offset, nbytes = base + first * page_bytes, count * page_bytes
                if offset == last_end:
                    out[-1] = (out[-1][0], out[-1][1] + nbytes)
                else:
                    out.append((offset, nbytes))
                last_end = offset + nbytes
        return out
