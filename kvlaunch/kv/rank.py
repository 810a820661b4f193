"""The KV memory of one rank, and which of its pages are mapped: the one owner of both."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvlaunch.kv.geometry import BlockGeometry, merged_runs
from kvlaunch.kv.ipc.messages import Map, PageRun, RankResult, RankState, Undo, Unmap
from kvlaunch.kv.memory.base import Region

NULL_PAGE = 0
"""The page of block 0, the engines' null block: mapped for as long as the rank lives."""

_SENDERS_REMEMBERED = 64

Operation = Map | Unmap | Undo
Fault = Callable[[Map | Unmap], None]


@dataclass(slots=True)
class _Record:
    """The last Map or Unmap of one sender."""

    seq: int
    result: RankResult
    applied: Map | Unmap | None
    """The operation, while it is in force."""


class RankMemory:
    """Applies operations to a rank's region: each at most once, and as a whole or not at all. Thread-safe.

    Args:
        region: the rank's memory, nothing of this geometry mapped yet; closed by `close`.
        geometry: the layout of the blocks in it.
        run, epoch: operations of another run or epoch are refused.
        beside: another memory in the same region, whose blocks this one's do not touch. Each has pages of its own; the
            bytes that either states are those of the region.
        fault: called with each operation before it is applied; an OSError, RuntimeError or ValueError that it raises
            is the operation's failure (tests).

    Raises:
        ValueError: the layout does not fit the region.
        MemoryMapError: no memory for the null block's page.
    """

    def __init__(
        self,
        region: Region,
        geometry: BlockGeometry,
        *,
        global_rank: int,
        pp_rank: int,
        tp_rank: int,
        run: str,
        epoch: int,
        fault: Fault | None = None,
        beside: RankMemory | None = None,
    ) -> None:
        if geometry.region_bytes > region.nbytes:
            raise ValueError(f"the KV layout takes {geometry.region_bytes} bytes, the region has {region.nbytes}")
        if geometry.granularity % region.granularity:
            raise ValueError(
                f"the KV layout's granularity, {geometry.granularity} bytes, is not a multiple of the region's,"
                f" {region.granularity}"
            )
        self.region = region
        self.geometry = geometry
        self.global_rank = global_rank
        self.pp_rank = pp_rank
        self.tp_rank = tp_rank
        self.run = run
        self.epoch = epoch
        self.limit_pages: int | None = None
        """The limit that this rank's own manager keeps, for `state`; None: none, or the manager is elsewhere."""
        self._fault = fault
        self._lock: threading.Lock = threading.Lock() if beside is None else beside._lock
        self._records: dict[str, _Record] = {}
        self._ok = RankResult(global_rank=global_rank)
        self._mapped = bytearray(geometry.num_pages)
        with self._lock:
            region.map_many(geometry.ranges([(NULL_PAGE, 1)]))
        self._mapped[NULL_PAGE] = 1

    def apply(self, request: Operation) -> RankResult:
        """Apply an operation, or answer it again where it was applied before. A failure changes nothing."""
        with self._lock:
            if request.run != self.run or request.epoch != self.epoch:
                return self._failed(
                    f"this rank belongs to run {self.run} epoch {self.epoch}, the request to run {request.run} epoch"
                    f" {request.epoch}"
                )
            record = self._records.get(request.sender)
            if isinstance(request, Undo):
                return self._undo(request, record)
            if record is not None and request.seq <= record.seq:
                if request.seq == record.seq:
                    return record.result
                return self._failed(f"operation {request.seq} came after {record.seq} of the same sender")
            error = self._change(request)
            result = self._ok if error is None else self._failed(error)
            self._remember(request.sender, _Record(request.seq, result, request if error is None else None))
            return result

    def state(self) -> RankState:
        with self._lock:
            return RankState(
                global_rank=self.global_rank,
                pp_rank=self.pp_rank,
                tp_rank=self.tp_rank,
                pid=os.getpid(),
                reserved_bytes=self.region.nbytes,
                mapped_bytes=self.region.mapped_bytes,
                mapped_pages=self._mapped.count(1),
                num_blocks=self.geometry.num_blocks,
                blocks_per_page=self.geometry.blocks_per_page,
                limit_pages=self.limit_pages,
            )

    def mapped_runs(self) -> list[PageRun]:
        """The mapped pages, ascending, as runs."""
        with self._lock:
            runs, page = [], self._mapped.find(1)
            while page >= 0:
                end = self._mapped.find(0, page)
                end = len(self._mapped) if end < 0 else end
                runs.append((page, end - page))
                page = self._mapped.find(1, end)
            return runs

    def close(self) -> None:
        """Give back all memory. The engine must no longer use it."""
        with self._lock:
            self.region.close()
            self._mapped = bytearray(self.geometry.num_pages)

    def _failed(self, error: str) -> RankResult:
        return RankResult(global_rank=self.global_rank, error=error)

    def _remember(self, sender: str, record: _Record) -> None:
        if sender not in self._records and len(self._records) >= _SENDERS_REMEMBERED:
            del self._records[next(iter(self._records))]
        self._records[sender] = record

    def _undo(self, request: Undo, record: _Record | None) -> RankResult:
        if record is None or record.seq < request.of:
            # It never arrived. Should it still come, it must not be applied.
            late = self._failed(f"operation {request.of} had been taken back before it came")
            self._remember(request.sender, _Record(request.of, late, None))
            return self._ok
        if record.seq > request.of:
            return self._failed(f"operation {request.of} cannot be taken back: {record.seq} came after it")
        if record.applied is None:
            return self._ok
        kind = Unmap if isinstance(record.applied, Map) else Map
        error = self._change(
            kind(
                run=request.run,
                epoch=request.epoch,
                sender=request.sender,
                seq=request.seq,
                pages=record.applied.pages,
            )
        )
        if error is not None:
            return self._failed(f"operation {request.of} could not be taken back: {error}")
        self._remember(request.sender, _Record(request.of, self._failed("the operation was taken back"), None))
        return self._ok

    def _change(self, request: Map | Unmap) -> str | None:
        """Change the memory; the reason where that failed."""
        mapping = isinstance(request, Map)
        mapped = self._mapped
        try:
            if self._fault is not None:
                self._fault(request)
            runs = merged_runs(request.pages)
            ranges = self.geometry.merged_ranges(runs)
            for first, count in runs:
                if first <= NULL_PAGE < first + count:
                    return f"page {NULL_PAGE} holds the null block and stays mapped"
                wrong = mapped.find(mapping, first, first + count)
                if wrong >= 0:
                    return f"page {wrong} is {'already' if mapping else 'not'} mapped"
            if mapping:
                self.region.map_many(ranges)
            else:
                self.region.unmap_many(ranges)
        except (OSError, RuntimeError, ValueError) as error:
            return str(error) or type(error).__name__
        for first, count in runs:
            mapped[first : first + count] = (b"\1" if mapping else b"\0") * count
        return None
