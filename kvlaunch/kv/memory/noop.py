"""No memory at all: for benchmarks and for tests of what stands above memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kvlaunch.kv.memory.base import MemoryMapError, Region, check_size

if TYPE_CHECKING:
    import torch

Operation = tuple[Literal["map", "unmap"], tuple[tuple[int, int], ...]]
"""What was done, and the (start, end) of each byte range."""


class NoopBackend:
    """Regions without memory: the arithmetic and the refusals are real.

    Args:
        granularity: bytes.
        record: regions keep a list of what was done to them.
    """

    def __init__(self, granularity: int = 4096, *, record: bool = False) -> None:
        self._granularity = granularity
        self._record = record

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, nbytes: int) -> NoopRegion:
        check_size(nbytes, self._granularity)
        return NoopRegion(nbytes, self._granularity, record=self._record)


class NoopRegion(Region):
    """A region without memory.

    Attributes:
        operations: what was done, oldest first, where the backend records.
        fail_after: operations that still succeed before every one fails; None: no limit.
        fail_on: byte offsets that cannot be mapped or unmapped.
    """

    def __init__(self, nbytes: int, granularity: int, *, record: bool) -> None:
        super().__init__(0, nbytes, granularity)
        self.operations: list[Operation] = []
        self.fail_after: int | None = None
        self.fail_on: frozenset[int] = frozenset()
        self._record = record

    def tensor(self) -> torch.Tensor:
        """A meta tensor: shape and type, no bytes."""
        import torch

        return torch.empty(self.nbytes, dtype=torch.int8, device="meta")

    def _commit(self, spans: Sequence[tuple[int, int]]) -> None:
        self._act("map", spans)

    def _release(self, spans: Sequence[tuple[int, int]]) -> None:
        self._act("unmap", spans)

    def _act(self, kind: Literal["map", "unmap"], spans: Sequence[tuple[int, int]]) -> None:
        if self.fail_after is not None:
            if self.fail_after <= 0:
                raise MemoryMapError(f"{kind}: no memory, as the test wants it")
            self.fail_after -= 1
        for offset in self.fail_on:
            if any(start <= offset < end for start, end in spans):
                raise MemoryMapError(f"{kind}: byte {offset} fails, as the test wants it")
        if self._record:
            self.operations.append((kind, tuple(spans)))

    def _dispose(self) -> None:
        pass
