"""What the manager's tests share: ranks in memory that check what is asked of them, and a clock that stands still."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.ipc.messages import PageRun, RankState
from kvlaunch.kv.manager import KVCacheManager
from kvlaunch.kv.settings import KVSettings

DEADLINE_S = 20.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeRanks:
    """A channel to `world_size` ranks in memory. A page that is mapped twice or unmapped unmapped is an error."""

    def __init__(self, settings: KVSettings, world_size: int) -> None:
        self.settings, self.world_size = settings, world_size
        self.mapped = {0}
        self.log: list[tuple[str, tuple[PageRun, ...]]] = []
        self.fail: Callable[[str, set[int]], bool] = lambda kind, pages: False
        self.crash: Exception | None = None
        self.on_unmap: Callable[[set[int]], None] = lambda pages: None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.closed = False

    def map(self, pages: Sequence[PageRun]) -> None:
        added = self._enter("map", pages)
        assert not added & self.mapped, f"mapped twice: {added & self.mapped}"
        self.mapped |= added

    def unmap(self, pages: Sequence[PageRun]) -> None:
        gone = self._enter("unmap", pages)
        assert gone <= self.mapped, f"unmapped without being mapped: {gone - self.mapped}"
        assert 0 not in gone
        self.on_unmap(gone)
        self.mapped -= gone

    def state(self) -> list[RankState]:
        return [self.rank_state(rank) for rank in range(self.world_size)]

    def rank_state(self, rank: int, **changes: Any) -> RankState:
        fields: dict[str, Any] = {
            "global_rank": rank,
            "pp_rank": 0,
            "tp_rank": rank,
            "pid": 1,
            "reserved_bytes": 0,
            "mapped_bytes": 0,
            "mapped_pages": len(self.mapped),
            "num_blocks": self.settings.num_blocks,
            "blocks_per_page": self.settings.blocks_per_page,
        }
        return RankState(**(fields | changes))

    def close(self) -> None:
        self.closed = True

    def _enter(self, kind: str, runs: Sequence[PageRun]) -> set[int]:
        assert not self.closed
        self.log.append((kind, tuple(runs)))
        self.entered.release()
        assert self.gate.wait(DEADLINE_S)
        if self.crash is not None:
            raise self.crash
        pages = {page for first, count in runs for page in range(first, first + count)}
        assert len(pages) == sum(count for _, count in runs)
        if self.fail(kind, pages):
            raise KVCommitError(f"rank 3 could not {kind} pages {sorted(pages)}", failures={3: "no memory"})
        return pages


class Bench:
    """A started manager with its fake ranks and clock. Close it."""

    def __init__(self, *, clock: Callable[[], float] | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {"num_blocks": 160, "blocks_per_page": 4, "ahead_low": 0, "ahead_high": 0}
        self.settings = KVSettings(**(fields | changes))
        self.ranks = FakeRanks(self.settings, 4)
        self.clock = FakeClock()
        self.woken = threading.Semaphore(0)
        self.manager = KVCacheManager(
            world_size=4,
            settings=self.settings,
            channel=self.ranks,
            wake=self.woken.release,
            clock=clock or self.clock,
        )
        self.manager.start()

    def settle(self) -> None:
        """Wait until every operation under way has ended, and integrate it."""
        manager = self.manager
        while manager._pool.mapping_pages or manager._commits.unmaps_under_way():
            manager._background.wait_result()
            manager._integrate()

    def get(self, n: int) -> list[int]:
        assert self.manager.ensure(n) >= n
        return self.manager.take(n)

    def step(self) -> None:
        self.manager.step_scheduled()
        self.manager.step_finished()

    def idle(self) -> None:
        """Let idle_s pass, and do what is due."""
        self.idle_without_settling()
        self.settle()

    def idle_without_settling(self) -> None:
        self.clock.now += self.settings.idle_s
        self.manager.tick()

    def await_wake(self) -> None:
        assert self.woken.acquire(timeout=DEADLINE_S)

    def close(self) -> None:
        self.ranks.gate.set()
        self.manager.close()
