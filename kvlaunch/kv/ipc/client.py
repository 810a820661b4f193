"""The channel from a KVCacheManager to the listeners of all stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvlaunch.errors import KVCommitError, KVLaunchError
from kvlaunch.kv.geometry import merged_runs
from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.leaders import Leader, LocalLeader, NetworkLeader, RemoteLeader
from kvlaunch.kv.ipc.messages import (
    Done,
    Failed,
    Map,
    PageRun,
    Ping,
    Pong,
    RankState,
    Refused,
    Reply,
    Request,
    SetLimit,
    StageState,
    State,
    Undo,
    Unmap,
)
from kvlaunch.kv.ipc.network import TCP
from kvlaunch.kv.ipc.stage import COMMIT_SHARE
from kvlaunch.secret import Secret


class ZmqChannel:
    """Applies operations on every rank of every stage or on none. Implements `kvlaunch.kv.channel.Channel`.

    A request goes to all stages at once and is repeated under its sequence number where no reply comes. Where a stage
    fails, those that had applied it are told to take it back. A stage that stays silent is told so too, without
    waiting; before the next operation it must confirm, so that no operation is ever built on a state that is not known.

    Args:
        endpoints: pp_rank -> ZeroMQ endpoint of the stage's listener.
        leaders: pp_rank -> global rank of the stage's tp_rank 0 (for messages).
        run, epoch: of this engine.
        sender: name of this requester, unique a process and epoch (sequence numbers count for each sender).
        timeout_s: seconds that one call may take, repeats and taking back included.
        retries: how often a request without a reply is repeated.
        sockets: pp_rank -> the socket on which the stage takes its peers in, for stages whose leader is on this host:
            requests go there, past ZeroMQ, at less than half the cost.
        secret: of the run, for stages whose endpoint is `tcp://HOST:PORT`.

    Raises:
        ConfigError: there is such a stage, and no secret.
        KVCommitError: the host name of such a stage is not known.
    """

    def __init__(
        self,
        endpoints: Mapping[int, str],
        *,
        leaders: Mapping[int, int],
        run: str,
        epoch: int,
        sender: str,
        timeout_s: float = 5.0,
        retries: int = 1,
        sockets: Mapping[int, Path] | None = None,
        secret: Secret | None = None,
    ) -> None:
        if set(endpoints) != set(leaders) or not endpoints:
            raise ValueError(f"endpoints of stages {sorted(endpoints)}, leaders of stages {sorted(leaders)}")
        self._run = run
        self._epoch = epoch
        self._sender = sender
        self._timeout_s = timeout_s
        self._retries = retries
        self._seq = 0
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # its threads start with the first stage by ZeroMQ
        self._stages: list[Leader] = []
        self._unsettled: list[Leader] = []
        self._unsettled_seq = 0
        try:
            for pp in sorted(endpoints):
                if sockets and pp in sockets:
                    self._stages.append(LocalLeader(pp, leaders[pp], sockets[pp], sender))
                    continue
                self._context = self._context or zmq.Context()
                if endpoints[pp].startswith(TCP):
                    self._stages.append(
                        NetworkLeader(self._context, pp, leaders[pp], endpoints[pp], secret=secret, run=run)
                    )
                else:
                    self._stages.append(RemoteLeader(self._context, pp, leaders[pp], endpoints[pp]))
        except (KVLaunchError, ValueError):
            self.close()
            raise

    def map(self, pages: Sequence[PageRun]) -> None:
        self._commit(Map, "map", pages)

    def unmap(self, pages: Sequence[PageRun]) -> None:
        self._commit(Unmap, "unmap", pages)

    def state(self) -> list[RankState]:
        replies = self._inquire(State, StageState, "Could not read the state of every rank", self._stages)
        ranks = [rank for reply in replies if isinstance(reply, StageState) for rank in reply.ranks]
        return sorted(ranks, key=lambda rank: rank.global_rank)

    def set_limit(self, pages: int | None) -> None:
        """Ask the first stage's leader to have every rank keep a limit (pages mapped at once; None: no limit).

        It returns when the leader has understood; the ranks follow at their next step, and `state` then says so.

        Raises:
            KVCommitError: it refused, or did not answer in time.
        """
        self._inquire(SetLimit, Done, "Could not set the limit", self._stages[:1], pages=pages)

    def ping(self) -> list[Pong]:
        """Ask every stage's leader whether it is there; by stage.

        Raises:
            KVCommitError: one did not answer in time.
        """
        replies = self._inquire(Ping, Pong, "Could not reach every stage", self._stages)
        return [reply for reply in replies if isinstance(reply, Pong)]

    def close(self) -> None:
        """Close the connections. May be called twice."""
        with self._lock:
            for stage in self._stages:
                stage.close()
            self._stages = []
            if self._context is not None:
                self._context.term()
                self._context = None

    def _inquire(
        self, kind: type[Request], good: type[Reply], what: str, stages: Sequence[Leader], **fields: Any
    ) -> list[Reply]:
        """One request that changes no memory to each of the stages; their replies, all of the good kind, in order.

        Raises:
            KVCommitError: `what`, and which stage refused or did not answer in time.
        """
        with self._lock:
            self._check_open()
            seq = self._next_seq()
            request = kind(run=self._run, epoch=self._epoch, sender=self._sender, seq=seq, **fields)
            replies = self._ask(stages, wire.encode(request), seq, time.monotonic() + self._timeout_s)
            failures = self._failures(replies, self._timeout_s, good=good, among=stages)
            if failures:
                raise self._error(what, failures)
            return [replies[stage] for stage in stages]

    def _commit(self, kind: type[Map | Unmap], verb: str, pages: Sequence[PageRun]) -> None:
        runs = tuple(merged_runs(pages))
        if not runs:
            return
        with self._lock:
            self._check_open()
            started = time.monotonic()
            deadline = started + COMMIT_SHARE * self._timeout_s
            what = f"Could not {verb} {_named(runs)} on every rank"
            if self._unsettled:
                self._settle(what, deadline)
            seq = self._next_seq()
            payload = wire.encode(kind(run=self._run, epoch=self._epoch, sender=self._sender, seq=seq, pages=runs))
            if len(payload) > wire.MAX_MESSAGE:
                raise ValueError(f"{len(runs)} separate runs of pages are too many for one operation; split it")
            replies = self._ask(self._stages, payload, seq, deadline)
            if len(replies) == len(self._stages) and all(type(reply) is Done for reply in replies.values()):
                return
            failures = self._failures(replies, time.monotonic() - started, good=Done)
            self._take_back(seq, replies, started + self._timeout_s)
            raise self._error(what, failures, replies.values())

    def _take_back(self, of: int, replies: Mapping[Leader, Reply], deadline: float) -> None:
        applied = [stage for stage, reply in replies.items() if isinstance(reply, Done)]
        silent = [stage for stage in self._stages if stage not in replies]
        seq = self._next_seq()
        undo = wire.encode(Undo(run=self._run, epoch=self._epoch, sender=self._sender, seq=seq, of=of))
        for stage in silent:  # it takes the operation back when it wakes; whether it did is asked before the next one
            stage.send(undo)
        answers = self._ask(applied, undo, seq, deadline)
        self._unsettled = silent + [stage for stage in applied if not isinstance(answers.get(stage), Done)]
        self._unsettled_seq = of

    def _settle(self, what: str, deadline: float) -> None:
        """Have the stages confirm that the operation in doubt is taken back."""
        started = time.monotonic()
        seq = self._next_seq()
        undo = Undo(run=self._run, epoch=self._epoch, sender=self._sender, seq=seq, of=self._unsettled_seq)
        answers = self._ask(self._unsettled, wire.encode(undo), seq, deadline)
        failures = self._failures(answers, time.monotonic() - started, good=Done, among=self._unsettled)
        self._unsettled = [stage for stage in self._unsettled if not isinstance(answers.get(stage), Done)]
        if failures:
            raise self._error(f"{what}: an earlier operation is not taken back yet", failures)

    def _check_open(self) -> None:
        if not self._stages:
            raise KVCommitError("The KV channel is closed.", failures={})

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _ask(self, stages: Iterable[Leader], payload: bytes, seq: int, deadline: float) -> dict[Leader, Reply]:
        """Send to all stages, repeat where nothing comes, and collect the replies until the deadline."""
        waiting = list(stages)
        for stage in waiting:
            stage.send(payload)
        replies: dict[Leader, Reply] = {}
        interval = repeat_at = 0.0
        while True:
            still: list[Leader] = []
            for stage in waiting:
                # Only the first that is missing is waited for; the answers of the others queue up meanwhile.
                reply = stage.receive(seq, wait=not still)
                if reply is None:
                    still.append(stage)
                else:
                    replies[stage] = reply
            if not still:
                return replies
            waiting = still
            now = time.monotonic()
            if now >= deadline:
                return replies
            if not interval:
                interval = (deadline - now) / (self._retries + 1)
                repeat_at = now + interval
            elif now >= repeat_at:
                repeat_at += interval
                for stage in waiting:
                    stage.send(payload)

    def _failures(
        self,
        replies: Mapping[Leader, Reply],
        waited_s: float,
        *,
        good: type[Reply],
        among: Iterable[Leader] | None = None,
    ) -> dict[int, str]:
        """Global rank -> why it failed, for every stage whose reply is not a good one."""
        failures: dict[int, str] = {}
        for stage in self._stages if among is None else among:
            match replies.get(stage):
                case None:
                    failures[stage.global_rank] = (
                        f"the listener of stage {stage.pp_rank} did not answer within {waited_s:.2f} s{stage.trouble}"
                    )
                case Failed(results=results):
                    failures |= {result.global_rank: result.error or "failed" for result in results}
                case Refused(reason=reason):
                    failures[stage.global_rank] = f"the listener of stage {stage.pp_rank} refused: {reason}"
                case reply if not isinstance(reply, good):
                    failures[stage.global_rank] = (
                        f"the listener of stage {stage.pp_rank} answered with {type(reply).__name__}"
                    )
        return failures

    def _error(self, what: str, failures: Mapping[int, str], replies: Iterable[Reply] = ()) -> KVCommitError:
        settled = not self._unsettled and all(reply.settled for reply in replies if isinstance(reply, Failed))
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items()))
        return KVCommitError(f"{what}: {reasons}.", failures=failures, settled=settled)


def _named(runs: Sequence[PageRun]) -> str:
    """The pages, as a person reads them; the first few runs."""
    names = [str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in runs[:4]]
    total = sum(n for _, n in runs)
    return f"page{'s' if total > 1 else ''} {', '.join(names)}{', ...' if len(runs) > 4 else ''}"
