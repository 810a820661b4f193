"""The messages between a KVCacheManager and the ranks: a closed set of tagged structs, MessagePack on the wire.

Every request carries the run, the epoch (restart generation) and a sequence number. A rank answers a request of
another run or epoch with `Refused` and does nothing. It remembers the last operation of each sender and the answer
it gave, so a repeated request is answered again and not applied again.

`Undo` takes exactly one operation back, by its sequence number. It is what makes an unanswered request harmless:
whether the rank had applied the operation, had refused it, or never saw it, after the Undo the rank is as it was
before, and a copy of the operation that arrives later is not applied.
"""

from __future__ import annotations

import msgspec

PageRun = tuple[int, int]
"""(first page, number of pages)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    run: str
    epoch: int
    sender: str
    """Identity of the requester, unique a process: sequence numbers count for each sender."""
    seq: int


class Map(Message, frozen=True, kw_only=True, tag="map"):
    """Put physical memory, zeroed, behind these pages on every rank of the stage."""

    pages: tuple[PageRun, ...]


class Unmap(Message, frozen=True, kw_only=True, tag="unmap"):
    """Give the physical memory of these pages back on every rank of the stage."""

    pages: tuple[PageRun, ...]


class Undo(Message, frozen=True, kw_only=True, tag="undo"):
    """Take back the sender's operation `of` (its sequence number) where it was applied; may be repeated.

    Taking back an Unmap maps the pages again; what they held is lost.
    """

    of: int


class State(Message, frozen=True, kw_only=True, tag="state"):
    """Ask every rank of the stage for its state."""


class SetLimit(Message, frozen=True, kw_only=True, tag="limit"):
    """Change the number of pages that the managers of this stage may keep mapped; None lifts the limit."""

    pages: int | None


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Ask the leader alone whether it is there."""


Request = Map | Unmap | Undo | State | SetLimit | Ping


class RankState(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one rank says of itself. Bytes are of its KV region; pages and blocks of one pool where two lie in it."""

    global_rank: int
    pp_rank: int
    tp_rank: int
    pid: int
    reserved_bytes: int
    mapped_bytes: int
    mapped_pages: int
    num_blocks: int
    blocks_per_page: int
    limit_pages: int | None = None
    """What this rank's own manager may keep mapped; None: no limit, or its manager is elsewhere."""


class RankResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One rank's answer to Map, Unmap or Undo."""

    global_rank: int
    error: str | None = None
    """None: applied. Else the reason why not; the rank is then as it was before."""


class Done(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="done"):
    """Map, Unmap or Undo was applied on every rank of the stage."""

    seq: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="failed"):
    """The operation failed on at least one rank; those that had applied a Map or Unmap were told to take it back."""

    seq: int
    results: tuple[RankResult, ...]
    """The ranks that failed."""
    settled: bool = True
    """Every rank of the stage is known to be as it was before. Else the stage finishes taking the operation back before
    it begins another one."""


class StageState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="stage"):
    seq: int
    ranks: tuple[RankState, ...]


class Pong(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pong"):
    seq: int
    global_rank: int
    pid: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="refused"):
    """The request was not understood or not for this listener; nothing was done."""

    seq: int
    reason: str


Reply = Done | Failed | StageState | Pong | Refused


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello"):
    """What a rank says first when it joins its stage's leader."""

    run: str
    epoch: int
    global_rank: int


class HelloRequester(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="requester"):
    """What a requester on the same host says first when it takes the cheaper way, past ZeroMQ."""

    sender: str


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="welcome"):
    """The leader's answer to a Hello; after an error it closes the connection."""

    error: str | None = None
