"""A channel to the one rank that lives in this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.geometry import merged_runs
from kvlaunch.kv.ipc.messages import Map, PageRun, RankState, Unmap
from kvlaunch.kv.rank import RankMemory


class LocalChannel:
    """For an engine whose every rank has a manager of its own. Implements `kvlaunch.kv.channel.Channel`.

    Args:
        rank: the rank's memory. Not closed here.
        sender: name of this requester; one memory may serve several.
    """

    def __init__(self, rank: RankMemory, *, sender: str = "local") -> None:
        self._rank = rank
        self._sender = sender
        self._seq = count(1)

    def map(self, pages: Sequence[PageRun]) -> None:
        self._apply(Map, "map", pages)

    def unmap(self, pages: Sequence[PageRun]) -> None:
        self._apply(Unmap, "unmap", pages)

    def state(self) -> list[RankState]:
        return [self._rank.state()]

    def close(self) -> None:
        pass

    def _apply(self, kind: type[Map | Unmap], verb: str, pages: Sequence[PageRun]) -> None:
        runs = tuple(merged_runs(pages))
        rank = self._rank
        if not runs:
            return
        result = rank.apply(kind(run=rank.run, epoch=rank.epoch, sender=self._sender, seq=next(self._seq), pages=runs))
        if result.error is not None:
            raise KVCommitError(
                f"Could not {verb} {sum(n for _, n in runs)} page(s) on rank {rank.global_rank}: {result.error}",
                failures={rank.global_rank: result.error},
            )
