"""What changes the ranks' KV caches beside their requests: decided by the first rank, done by all in the same step.

Each rank of SGLang counts its slots and keeps a prefix cache (radix tree) for itself, and they must stay alike. So the
rank that receives the requests for all (stage 0, tp rank 0) puts its orders among them; SGLang hands them on to the
other ranks with the requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlaunch.kv.settings import check_limit


@dataclass(frozen=True, slots=True)
class Trim:
    """Evict so many tokens from the prefix cache, least recently used first."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Limit:
    """From now on use the blocks of so many pages only, page 0 included; None: of all."""

    pages: int | None


Order = Trim | Limit


class LimitBox:
    """The limit that a listener was told and that the ranks have not been told yet. Thread-safe."""

    def __init__(self) -> None:
        self._orders: deque[Limit] = deque(maxlen=1)

    def put(self, pages: int | None) -> None:
        """Called by the listener's thread. Raises ValueError for a limit without page 0."""
        check_limit(pages)
        self._orders.append(Limit(pages))

    def due(self) -> Limit | None:
        """Called by the scheduler at every turn of its loop."""
        return self._orders.popleft() if self._orders else None


class Trimmer:
    """Decides when cached tokens have idled too long, or stand in the way of the limit.

    The tree tells how many tokens it could evict, not since when. But it evicts the least recently used first, and only
    requests use tokens: all but as many as the requests of the last `idle_s` seconds had are older than that. Where
    requests share a prefix that counts it more than once, and old tokens stay somewhat longer.

    Args:
        keep_tokens: tokens that stay however long they idle.
        idle_s: seconds after which the others go.
        evictable: tokens in the tree that no request uses.
        over_limit: tokens that the pages held beyond the limit have room for; so many are evicted however young.
    """

    def __init__(
        self,
        *,
        keep_tokens: int,
        idle_s: float,
        evictable: Callable[[], int],
        over_limit: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep = keep_tokens
        self._idle_s = idle_s
        self._evictable = evictable
        self._over_limit = over_limit
        self._clock = clock
        self._pause = min(1.0, idle_s / 10)
        self._next = clock()
        self._used: deque[tuple[float, int]] = deque()
        self._recent = 0

    def requests_ended(self, requests: Sequence[Any]) -> None:
        """These requests (SGLang's Req) are done: their tokens have just been used."""
        tokens = sum(len(req.origin_input_ids) + len(req.output_ids) for req in requests)
        if tokens:
            self._used.append((self._clock(), tokens))
            self._recent += tokens

    def due(self) -> Trim | None:
        """What is to be evicted now, if anything. Asked at every turn of the scheduler's loop; cheap."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + self._pause
        while self._used and self._used[0][0] <= now - self._idle_s:
            self._recent -= self._used.popleft()[1]
        evictable = self._evictable()
        excess = max(evictable - max(self._keep, self._recent), min(evictable, self._over_limit()))
        return Trim(excess) if excess > 0 else None
