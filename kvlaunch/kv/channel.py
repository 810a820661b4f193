"""How a KVCacheManager reaches the ranks that it keeps in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvlaunch.kv.ipc.messages import PageRun, RankState


class Channel(Protocol):
    """Applies an operation on every rank or on none. Calls come from one thread at a time."""

    def map(self, pages: Sequence[PageRun]) -> None:
        """Put memory behind the pages on every rank.

        Raises:
            KVCommitError: on at least one rank it failed or did not answer in time; no rank has the pages mapped
                (those that had were rolled back). Where a rank did not answer, it may have them for now (`settled` is
                False); that is taken back before the next operation, so the pages may be treated as unmapped.
            ValueError: not a set of pages.
        """

    def unmap(self, pages: Sequence[PageRun]) -> None:
        """Give the memory of the pages back on every rank.

        Raises:
            KVCommitError: at least one rank failed or did not answer in time. `settled` True: every rank has the pages
                mapped still (or again, zeroed). False: some rank may have them unmapped. Either way do not touch the
                pages; unmap them again later, the channel gets the ranks back in step first.
            ValueError: not a set of pages.
        """

    def state(self) -> list[RankState]:
        """The state of every rank, by global rank.

        Raises:
            KVCommitError: a stage did not answer in time.
        """

    def close(self) -> None: ...
