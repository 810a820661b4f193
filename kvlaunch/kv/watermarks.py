"""How many free pages are kept mapped ahead of need."""

from __future__ import annotations


class Watermarks:
    """Below `low` free pages more are mapped, up to `high`.

    They start as configured. What a burst of requests takes at once depends on the model, the prompts and how many come
    together, so each step that had to wait doubles the reserve, and each time of idleness halves it again.

    Args:
        low: as configured.
        high: as configured; 0 means that nothing is ever mapped ahead.
        most: pages that the reserve may grow to.
    """

    __slots__ = ("_high", "_low", "_most", "high", "low")

    def __init__(self, low: int, high: int, most: int) -> None:
        self.low = self._low = low
        self.high = self._high = high
        self._most = max(high, most)

    def outrun(self) -> None:
        """A step had to wait: the reserve was too small."""
        self._set(min(2 * self.high, self._most))

    def ease(self) -> None:
        """The engine is idle."""
        self._set(max(self.high // 2, self._high))

    def _set(self, high: int) -> None:
        self.high = high
        # A larger reserve is refilled from its middle, so that what is left serves a burst like the last one.
        self.low = self._low if high == self._high else max(self._low, high // 2)
