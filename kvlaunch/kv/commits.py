"""The operations of a KVCacheManager under way, and what came of them, seen from its owner thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.background import Background, Operation
from kvlaunch.kv.channel import Channel
from kvlaunch.kv.pages import PagePool

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0


class Backoff:
    """Spaces attempts: after each failure in a row the pause doubles, up to MAX_BACKOFF_S."""

    __slots__ = ("_first", "_next", "until")

    def __init__(self, first: float) -> None:
        self._first = self._next = min(first, MAX_BACKOFF_S)
        self.until: float | None = None
        """Time of the next attempt; None: nothing is known to be wrong."""

    def blocked(self, now: float) -> bool:
        return self.until is not None and now < self.until

    def fail(self, now: float) -> float:
        """Returns the pause in seconds."""
        pause = self._next
        self.until = now + pause
        self._next = min(2 * pause, MAX_BACKOFF_S)
        return pause

    def reset(self) -> None:
        self.until = None
        self._next = self._first


class Commits:
    """Maps and unmaps of pages: hands them to the background thread and keeps the PagePool true to their results.

    A map that fails leaves its pages UNMAPPED: the channel has rolled it back on every rank. After an unmap that
    fails nobody knows which ranks still have the pages; they stay UNMAPPING (quarantined), which counts as mapped and
    is never handed out, until a later attempt succeeds. Each failure starts the pause of its kind.

    For the owner thread; `background` is the other side.
    """

    def __init__(
        self,
        pool: PagePool,
        channel: Channel,
        wake: Callable[[], None],
        clock: Callable[[], float],
        backoff_s: float,
    ) -> None:
        self.background = Background(channel, wake, clock)
        self.demand = Backoff(backoff_s)
        """Maps that the owner waits for. Running: starved."""
        self.ahead = Backoff(backoff_s)
        """Maps ahead of need."""
        self.unmap = Backoff(backoff_s)
        self.last_error: KVCommitError | None = None
        self.quarantined_pages = 0
        self.closed = False
        """Set by the manager: nothing is begun any more."""
        self.maps = self.unmaps = self.failed_maps = self.failed_unmaps = 0
        self._pool = pool
        self._clock = clock
        self._quarantined: list[tuple[int, ...]] = []

    def begin_map(self, n: int, *, urgent: bool) -> None:
        """Have up to n pages mapped; urgent: the owner is about to wait for them."""
        if n > 0 and not self.closed:
            pages = self._pool.begin_map(n)
            if pages:
                self.background.submit(Operation("map", tuple(pages), urgent))

    def begin_unmaps(self, finished: int) -> None:
        """Have the RETIRING pages unmapped whose epoch is at most `finished`, and retry what had failed, if due."""
        if self.closed:
            return
        if self._pool.retiring_pages:
            pages = self._pool.release(finished)
            if pages:
                self.background.submit(Operation("unmap", tuple(pages)))
        if self._quarantined and not self.unmap.blocked(self._clock()):
            self._retry_unmaps()

    def unmaps_under_way(self) -> bool:
        return self._pool.unmapping_pages > self.quarantined_pages

    def next_attempt(self) -> float | None:
        """When starvation ends or failed unmaps are due again; None: neither is the case."""
        unmap = self.unmap.until if self._quarantined else None
        if self.demand.until is None or unmap is None:
            return unmap if self.demand.until is None else self.demand.until
        return min(self.demand.until, unmap)

    def integrate(self) -> None:
        """Take in all results that are there.

        Raises:
            Exception: the background thread has died; whatever it died of.
        """
        results = self.background.results
        while results:
            result = results.popleft()
            if isinstance(result, Exception):
                results.append(result)
                raise result
            if result.error is None:
                self._applied(result.operation)
            else:
                self._failed(result.operation, result.error)

    def _applied(self, operation: Operation) -> None:
        self.demand.reset()
        if operation.kind == "map":
            self.maps += 1
            self._pool.finish_map(operation.pages)
            if not operation.urgent:
                self.ahead.reset()
            return
        self.unmaps += 1
        self._pool.finish_unmap(operation.pages)
        self.ahead.reset()
        if not self._quarantined:
            self.unmap.reset()

    def _failed(self, operation: Operation, error: KVCommitError) -> None:
        self.last_error = error
        if operation.kind == "map":
            self.failed_maps += 1
            self._pool.abort_map(operation.pages)
            backoff = self.demand if operation.urgent else self.ahead
        else:
            self.failed_unmaps += 1
            self._quarantined.append(operation.pages)
            self.quarantined_pages += len(operation.pages)
            backoff = self.unmap
        pause = backoff.fail(self._clock())
        what = f"{len(operation.pages)} pages could not be {operation.kind}ped"
        logger.warning("KV cache: %s; next attempt in %.2f s: %s", what, pause, error)

    def _retry_unmaps(self) -> None:
        """Each failed unmap again, in two halves, so that a page that cannot be unmapped ends up alone."""
        batches, self._quarantined, self.quarantined_pages = self._quarantined, [], 0
        for batch in batches:
            middle = len(batch) // 2
            for part in (batch[:middle], batch[middle:]):
                if part:
                    self.background.submit(Operation("unmap", part))
