"""The ranks of one pipeline stage, as their leader sees them: an operation goes to all of them, or to none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.far import FarLink
from kvlaunch.kv.ipc.links import Link, LinkClosedError
from kvlaunch.kv.ipc.messages import Done, Failed, Map, RankResult, StageState, State, Undo, Unmap
from kvlaunch.kv.rank import Operation, RankMemory

COMMIT_SHARE = 0.7
"""Share of an operation's deadline after which those that have not answered count as failed; the rest is for taking
the operation back."""

_T = TypeVar("_T")


class Stage:
    """The leader's own rank and the links to its peers.

    `join`, `wait_ready` and `close` may be called from any thread, the rest from one.

    A rank that does not answer is in an unknown state: it is sent an Undo (a link keeps order, so it cannot overtake
    the operation; between hosts it can, and a rank does not apply what was taken back before it came), and no further
    operation begins before that rank has confirmed it.

    Args:
        rank: the leader's own memory.
        peers: global ranks of the other members.
        timeout_s: seconds that one operation may take, taking back included.
    """

    def __init__(self, rank: RankMemory, *, peers: Iterable[int], timeout_s: float) -> None:
        self._rank = rank
        self._peers = tuple(peers)
        self._timeout_s = timeout_s
        self._links: dict[int, Link | FarLink] = {}
        self._lost: dict[int, str] = {}
        self._joined = threading.Condition()
        self._exchange = 0
        self._unsettled: dict[int, Undo] = {}

    def refusal(self, global_rank: int) -> str | None:
        """Why a rank cannot join, or None where it can."""
        if global_rank not in self._peers:
            return f"rank {global_rank} does not belong to stage {self._rank.pp_rank}"
        link = self._links.get(global_rank)
        if link is not None and not link.gone():
            return f"rank {global_rank} has joined already"
        return None

    def join(self, global_rank: int, link: Link | FarLink) -> None:
        """Take a rank in that is not refused."""
        link.limit_waits(self._timeout_s)
        with self._joined:
            old = self._links.get(global_rank)
            # A new dict each time: the serving thread may be walking through the old one.
            self._links = {**self._links, global_rank: link}
            self._lost.pop(global_rank, None)
            self._joined.notify_all()
        if old is not None:
            old.close()

    def wait_ready(self, timeout: float) -> None:
        """Wait until every peer has joined.

        Raises:
            KVCommitError: some have not, after `timeout` seconds.
        """
        with self._joined:
            if self._joined.wait_for(lambda: not self._absent(), timeout):
                return
            missing = sorted(self._absent())
        raise KVCommitError(
            f"Stage {self._rank.pp_rank}: after {timeout:g} s, rank(s) {', '.join(map(str, missing))} have not joined"
            f" the KV listener on rank {self._rank.global_rank}.",
            failures=dict.fromkeys(missing, f"has not joined within {timeout:g} s"),
        )

    def commit(self, request: Operation, raw: bytes) -> Done | Failed:
        """Apply an operation on every rank of the stage, or take it back.

        Args:
            raw: the request's bytes, passed on to the peers as they are.
        """
        started = time.monotonic()
        deadline = started + COMMIT_SHARE * self._timeout_s
        errors = self._absent()
        if not errors and self._unsettled:
            errors = self._settle(deadline)
        if errors:
            return self._failed(request, errors)
        results, errors = self._ask(
            raw, self._peers, deadline, decode=wire.decode_result, own=lambda: self._rank.apply(request)
        )
        if not errors and not any(result.error for result in results.values()):
            return Done(seq=request.seq)
        unknown = tuple(errors)
        applied = tuple(r for r, result in results.items() if result.error is None)
        errors |= {r: result.error for r, result in results.items() if result.error is not None}
        if isinstance(request, Undo):
            return self._failed(request, errors, settled=False)
        self._take_back(request, applied, unknown, started + self._timeout_s)
        return self._failed(request, errors)

    def state(self, request: State, raw: bytes) -> StageState | Failed:
        """Ask every rank for its state."""
        errors = self._absent()
        if errors:
            return self._failed(request, errors)
        deadline = time.monotonic() + self._timeout_s
        states, errors = self._ask(raw, self._peers, deadline, decode=wire.decode_state, own=self._rank.state)
        if errors:
            return self._failed(request, errors)
        by_rank = sorted(states.values(), key=lambda s: s.global_rank)
        return StageState(seq=request.seq, ranks=tuple(by_rank))

    def close(self) -> None:
        with self._joined:
            links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _absent(self) -> dict[int, str]:
        links = self._links
        if len(links) == len(self._peers):
            return {}
        return {r: self._lost.get(r, "has not joined its stage") for r in self._peers if r not in links}

    def _failed(self, request: Operation | State, errors: Mapping[int, str], *, settled: bool = True) -> Failed:
        results = tuple(RankResult(global_rank=r, error=error) for r, error in sorted(errors.items()))
        return Failed(seq=request.seq, results=results, settled=settled and not self._unsettled)

    def _take_back(self, request: Map | Unmap, applied: Sequence[int], unknown: Sequence[int], deadline: float) -> None:
        undo = Undo(run=request.run, epoch=request.epoch, sender=request.sender, seq=request.seq, of=request.seq)
        self._unsettled = dict.fromkeys(unknown, undo)
        if unknown:  # they get it now, for when they wake; whether they did is asked before the next operation
            self._post(wire.encode(undo), unknown)
        self._undo(undo, applied, deadline)

    def _settle(self, deadline: float) -> dict[int, str]:
        """Finish taking back what earlier operations left in doubt; the reasons where that is not possible yet."""
        undo = next(iter(self._unsettled.values()))  # no operation begins before, so it is the same one for all
        errors = self._undo(undo, tuple(self._unsettled), deadline)
        return {rank: f"has not taken an earlier operation back: {error}" for rank, error in errors.items()}

    def _undo(self, undo: Undo, ranks: Sequence[int], deadline: float) -> dict[int, str]:
        own = self._rank.global_rank
        results, errors = self._ask(
            wire.encode(undo),
            [r for r in ranks if r != own],
            deadline,
            decode=wire.decode_result,
            own=(lambda: self._rank.apply(undo)) if own in ranks else None,
        )
        errors |= {r: result.error for r, result in results.items() if result.error is not None}
        for rank in ranks:
            if rank in errors:
                self._unsettled[rank] = undo
            else:
                self._unsettled.pop(rank, None)
        return errors

    def _ask(
        self,
        payload: bytes,
        ranks: Sequence[int],
        deadline: float,
        *,
        decode: Callable[[bytes | memoryview], _T],
        own: Callable[[], _T] | None,
    ) -> tuple[dict[int, _T], dict[int, str]]:
        """Send to peers, do the own part meanwhile, and collect: answers, and why there is none, by global rank."""
        asked_at = time.monotonic()
        waiting, errors = self._post(payload, ranks)
        answers: dict[int, _T] = {}
        if own is not None:
            answers[self._rank.global_rank] = own()
        for rank, link in waiting:
            try:
                number, body = link.receive(deadline)
                while number != self._exchange:  # a late answer to something that was given up
                    number, body = link.receive(deadline)
                answers[rank] = decode(body)
            except TimeoutError as error:
                where = f" ({error})" if error.args else ""
                errors[rank] = f"no answer within {time.monotonic() - asked_at:.2f} s{where}"
            except LinkClosedError as error:
                errors[rank] = self._drop(rank, link, str(error))
            except (OSError, wire.DecodeError) as error:
                errors[rank] = self._drop(rank, link, f"its answer could not be read: {error}")
        return answers, errors

    def _post(self, payload: bytes, ranks: Sequence[int]) -> tuple[list[tuple[int, Link | FarLink]], dict[int, str]]:
        """Send a new exchange: the links that took it, and the reasons of the others."""
        self._exchange += 1
        sent: list[tuple[int, Link | FarLink]] = []
        errors: dict[int, str] = {}
        links = self._links
        for rank in ranks:
            link = links.get(rank)
            if link is None:
                errors[rank] = "its connection is closed"
                continue
            try:
                link.send(self._exchange, payload)
                sent.append((rank, link))
            except OSError as error:  # a part may have been sent, so this link is of no more use
                errors[rank] = self._drop(rank, link, f"the request could not be sent: {error}")
        return sent, errors

    def _drop(self, rank: int, link: Link | FarLink, reason: str) -> str:
        link.close()
        with self._joined:
            if self._links.get(rank) is link:
                self._links = {r: other for r, other in self._links.items() if r != rank}
                self._lost[rank] = reason
        return reason
