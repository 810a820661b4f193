"""Cached tokens that nobody asks for go back: decided by the first rank, done by all of them in the same step.

Each rank of SGLang keeps a prefix cache (radix tree) of its own, and they must stay alike. So the rank that receives
the requests for all (stage 0, tp rank 0) puts a `Trim` among them; SGLang hands it on to the other ranks with them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Trim:
    """Evict so many tokens from the prefix cache, least recently used first."""

    tokens: int


class Trimmer:
    """Decides when cached tokens have idled too long.

    The tree tells how many tokens it could evict, not since when. But it evicts the least recently used first, and only
    requests use tokens: all but as many as the requests of the last `idle_s` seconds had are older than that. Where
    requests share a prefix that counts it more than once, and old tokens stay somewhat longer.

    Args:
        keep_tokens: tokens that stay however long they idle.
        idle_s: seconds after which the others go.
        evictable: tokens in the tree that no request uses.
    """

    def __init__(
        self,
        *,
        keep_tokens: int,
        idle_s: float,
        evictable: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep = keep_tokens
        self._idle_s = idle_s
        self._evictable = evictable
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
        excess = self._evictable() - max(self._keep, self._recent)
        return Trim(excess) if excess > 0 else None
