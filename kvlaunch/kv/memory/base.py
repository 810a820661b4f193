"""What a memory backend is: address space is reserved once, physical memory comes and goes behind it.

A `Region` does the arithmetic that all backends share (alignment, bounds, which bytes are mapped); a backend only says
how memory is put behind a byte range and how it is given back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

ByteRange = tuple[int, int]
"""(offset in the region, number of bytes)."""


class MemoryMapError(OSError):
    """The system gave no memory, or would not take it back. `errno` is the system's, or None where it has none.

    Whoever raises it has left the region as it was.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class RangeSet:
    """Disjoint half-open ranges of integers; neighbours are joined."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        """Sum of the lengths."""

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any part of [start, end) is in the set."""
        i = bisect_right(self._starts, start)
        return (i > 0 and self._ends[i - 1] > start) or (i < len(self._starts) and self._starts[i] < end)

    def contains(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is in the set."""
        i = bisect_right(self._starts, start)
        return i > 0 and self._ends[i - 1] >= end

    def add(self, start: int, end: int) -> None:
        """Add a range that does not overlap the set."""
        starts, ends = self._starts, self._ends
        i = bisect_left(starts, start)
        joins_left = i > 0 and ends[i - 1] == start
        joins_right = i < len(starts) and starts[i] == end
        if joins_left and joins_right:
            ends[i - 1] = ends[i]
            del starts[i], ends[i]
        elif joins_left:
            ends[i - 1] = end
        elif joins_right:
            starts[i] = start
        else:
            starts.insert(i, start)
            ends.insert(i, end)
        self.total += end - start

    def remove(self, start: int, end: int) -> None:
        """Remove a range that the set contains."""
        starts, ends = self._starts, self._ends
        i = bisect_right(starts, start) - 1
        keeps_left, keeps_right = starts[i] < start, ends[i] > end
        if keeps_left and keeps_right:
            starts.insert(i + 1, end)
            ends.insert(i, start)
        elif keeps_left:
            ends[i] = start
        elif keeps_right:
            starts[i] = end
        else:
            del starts[i], ends[i]
        self.total -= end - start

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of each range, ascending."""
        return list(zip(self._starts, self._ends, strict=True))


class Region(ABC):
    """A range of addresses, stable for as long as the region is open, with memory behind those parts that are mapped.

    Not thread-safe: one owner maps and unmaps.
    """

    def __init__(self, address: int, nbytes: int, granularity: int) -> None:
        self.address = address
        """Address of byte 0 (host or device, as the backend has it)."""
        self.nbytes = nbytes
        """Bytes of address space."""
        self.granularity = granularity
        """Bytes: offset and length of everything that is mapped or unmapped are multiples of it."""
        self._mapped = RangeSet()
        self._open = True

    @property
    def mapped_bytes(self) -> int:
        """Bytes with memory behind them."""
        return self._mapped.total

    def map(self, offset: int, nbytes: int) -> None:
        """Put zeroed memory behind a byte range. See `map_many`."""
        self.map_many([(offset, nbytes)])

    def unmap(self, offset: int, nbytes: int) -> None:
        """Give the memory behind a byte range back. See `unmap_many`."""
        self.unmap_many([(offset, nbytes)])

    def map_many(self, ranges: Sequence[ByteRange]) -> None:
        """Put zeroed memory behind all these byte ranges, or behind none.

        Raises:
            ValueError: a range is not aligned, out of bounds, given twice, or already mapped in part.
            MemoryMapError: not enough memory; nothing was mapped.
        """
        spans = self._checked(ranges)
        for start, end in spans:
            if self._mapped.overlaps(start, end):
                raise ValueError(f"bytes {start}..{end} of the region are already mapped, in part at least")
        self._commit(spans)
        for start, end in spans:
            self._mapped.add(start, end)

    def unmap_many(self, ranges: Sequence[ByteRange]) -> None:
        """Give the memory behind all these byte ranges back, or behind none. What it held is lost.

        Raises:
            ValueError: a range is not aligned, out of bounds, given twice, or not mapped as a whole.
            MemoryMapError: the system refused; all of it is still mapped.
        """
        spans = self._checked(ranges)
        for start, end in spans:
            if not self._mapped.contains(start, end):
                raise ValueError(f"bytes {start}..{end} of the region are not mapped, in part at least")
        self._release(spans)
        for start, end in spans:
            self._mapped.remove(start, end)

    def close(self) -> None:
        """Give back the memory and the addresses. Tensors over the region must not be touched afterwards."""
        if self._open:
            self._open = False
            self._dispose()
            self._mapped = RangeSet()

    def _checked(self, ranges: Sequence[ByteRange]) -> list[tuple[int, int]]:
        """As (start, end), ascending, neighbours joined."""
        if not self._open:
            raise ValueError("the region is closed")
        spans: list[tuple[int, int]] = []
        granularity, limit, last = self.granularity, self.nbytes, -1
        for offset, nbytes in sorted(ranges):
            if nbytes <= 0 or offset % granularity or nbytes % granularity:
                raise ValueError(
                    f"offset {offset} and length {nbytes} must be multiples of the granularity, {granularity} bytes,"
                    " and the length positive"
                )
            end = offset + nbytes
            if offset < 0 or end > limit:
                raise ValueError(f"bytes {offset}..{end} lie outside the region of {limit} bytes")
            if last > offset:
                raise ValueError(f"byte {offset} is in the request twice")
            if last == offset:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((offset, end))
            last = end
        return spans

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The flat int8 tensor over the whole region; no byte is touched. Only mapped parts may be used."""

    @abstractmethod
    def _commit(self, spans: Sequence[tuple[int, int]]) -> None:
        """Put zeroed memory behind every (start, end), or raise MemoryMapError having changed nothing."""

    @abstractmethod
    def _release(self, spans: Sequence[tuple[int, int]]) -> None:
        """Give back the memory of every (start, end), or raise MemoryMapError with all of it still mapped."""

    @abstractmethod
    def _dispose(self) -> None:
        """Give back everything."""


class MemoryBackend(Protocol):
    """Where a rank's KV memory comes from."""

    @property
    def granularity(self) -> int:
        """Bytes: the unit in which memory is mapped."""

    def reserve(self, nbytes: int) -> Region:
        """Reserve address space, none of it mapped.

        Raises:
            ValueError: nbytes is not a positive multiple of the granularity.
            MemoryMapError: the system has no such address space.
        """


def check_size(nbytes: int, granularity: int) -> None:
    """Raises ValueError where a region of nbytes cannot be made."""
    if nbytes <= 0 or nbytes % granularity:
        raise ValueError(f"a region of {nbytes} bytes: must be a positive multiple of the granularity, {granularity}")
