"""The StagePeer and the FarPeer: serve their stage's leader on a rank that is not tp_rank 0."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import msgspec

from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.far import split_exchange
from kvlaunch.kv.ipc.links import Link, LinkClosedError, connect
from kvlaunch.kv.ipc.messages import Hello, Map, RankResult, State, Undo, Unmap
from kvlaunch.kv.ipc.network import NetworkServer
from kvlaunch.kv.ipc.roles import rank_role
from kvlaunch.kv.rank import RankMemory
from kvlaunch.secret import Secret

log = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(Map | Unmap | Undo | State).decode
_RETRY_S = 0.02
_ATTEMPT_S = 1.0
"""Seconds that one attempt to join may take: `close` does not interrupt it."""


class StagePeer:
    """A thread that joins the stage's leader, applies what it asks, and answers.

    Where the connection breaks, it joins again.

    Args:
        rank: this process's memory. Not closed here.
        peer_path: socket on which the leader takes peers in.
        connect_timeout_s: seconds to wait for the leader, at the start and after a broken connection.
    """

    def __init__(self, rank: RankMemory, *, peer_path: Path, connect_timeout_s: float = 60.0) -> None:
        self._rank = rank
        self._path = peer_path
        self._connect_timeout_s = connect_timeout_s
        self._ok = _applied(rank)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self._last_refusal = ""
        self.error: str | None = None
        """Why the thread ended by itself, or None."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"kvlaunch-rank{self._rank.global_rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._closing.set()
        with self._lock:
            if self._link is not None:
                self._link.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            link = self._connect()
            if link is None:
                if not self._closing.is_set():
                    self.error = (
                        f"could not join a KV listener at {self._path} within {self._connect_timeout_s:g} s"
                        f" ({self._last_refusal})"
                    )
                    log.warning("rank %d: %s", self._rank.global_rank, self.error)
                return
            with self._lock:
                self._link = link
                if self._closing.is_set():
                    link.close()
            self._serve(link)
            link.close()

    def _connect(self) -> Link | None:
        deadline = time.monotonic() + self._connect_timeout_s
        rank = self._rank
        hello = Hello(run=rank.run, epoch=rank.epoch, global_rank=rank.global_rank)
        while not self._closing.is_set() and (left := deadline - time.monotonic()) > 0:
            try:
                return connect(self._path, hello, timeout_s=min(left, _ATTEMPT_S))
            except OSError as error:
                self._last_refusal = str(error)
            self._closing.wait(_RETRY_S)
        return None

    def _serve(self, link: Link) -> None:
        """Answer until the connection ends."""
        try:
            while True:
                exchange, raw = link.receive()
                link.send(exchange, _answer(self._rank, raw, self._ok))
        except LinkClosedError:
            return
        except OSError as error:
            if not self._closing.is_set():
                log.warning("rank %d: the connection to its KV listener broke: %s", self._rank.global_rank, error)


class FarPeer:
    """Answers a leader on another host, which connects to it (`kvlaunch.kv.ipc.far.FarLink`).

    Args:
        rank: this process's memory. Not closed here.
        endpoint: `tcp://HOST:PORT`, HOST an address of this host that the leader's reaches, port 0 for any.
        secret: of the run.

    Raises:
        ConfigError: there is no secret.
        ValueError: not such an endpoint.
    """

    def __init__(self, rank: RankMemory, *, endpoint: str, secret: Secret | None) -> None:
        self._rank = rank
        self._ok = _applied(rank)
        self._server = NetworkServer(
            endpoint,
            secret=secret,
            run=rank.run,
            role=rank_role(rank.global_rank),
            answer=self._answer,
            name=f"kvlaunch-rank{rank.global_rank}",
        )

    @property
    def endpoint(self) -> str:
        """With its port, once started."""
        return self._server.endpoint

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address is not this host's, or the port is taken.
        """
        self._server.start()

    def close(self) -> None:
        """End its threads. May be called twice."""
        self._server.close()

    def _answer(self, raw: bytes) -> bytes:
        number, payload = split_exchange(raw)
        return number + _answer(self._rank, payload, self._ok)


def _applied(rank: RankMemory) -> bytes:
    return wire.encode(RankResult(global_rank=rank.global_rank))


def _answer(rank: RankMemory, raw: bytes | memoryview, ok: bytes) -> bytes:
    """Do what a leader asks.

    Args:
        ok: the answer where an operation was applied.
    """
    try:
        request = _decode(raw)
    except wire.DecodeError as error:
        return wire.encode(RankResult(global_rank=rank.global_rank, error=f"not a request: {error}"))
    if isinstance(request, State):
        return wire.encode(rank.state())
    result = rank.apply(request)
    return ok if result.error is None else wire.encode(result)
