"""The two ways from a requester to a stage's leader: the stage's own socket on one host, ZeroMQ anywhere."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import zmq

from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.links import Link, connect
from kvlaunch.kv.ipc.messages import HelloRequester, Reply

WAIT_SLICE_S = 0.02
"""Seconds after which a wait returns, so that the caller can look at its deadline."""
_RECONNECT_MS = 20
_CONNECT_TIMEOUT_S = 0.2
_SEND_TIMEOUT_S = 0.2


class Leader(Protocol):
    """The connection to one stage's listener."""

    pp_rank: int
    global_rank: int

    @property
    def trouble(self) -> str:
        """What is known to be wrong with the connection, in brackets after a blank, or empty."""

    def send(self, payload: bytes) -> None:
        """Send a request. Where that is not possible just now it is lost: the caller repeats it."""

    def receive(self, seq: int, *, wait: bool) -> Reply | None:
        """The reply to `seq`, or None where it has not come yet (with wait: within a slice). Others are dropped."""

    def close(self) -> None: ...


class LocalLeader:
    """By the stage's own socket, for a leader on this host. Connects when there is something to send."""

    def __init__(self, pp_rank: int, global_rank: int, path: Path, sender: str) -> None:
        self.pp_rank = pp_rank
        self.global_rank = global_rank
        self._path = path
        self._hello = HelloRequester(sender=sender)
        self._link: Link | None = None
        self._trouble: OSError | None = None

    @property
    def trouble(self) -> str:
        return f" ({self._trouble})" if self._trouble else ""

    def send(self, payload: bytes) -> None:
        try:
            if self._link is None:
                self._link = connect(self._path, self._hello, _CONNECT_TIMEOUT_S)
                self._link.limit_waits(_SEND_TIMEOUT_S, WAIT_SLICE_S)
                self._trouble = None
            self._link.send(0, payload)
        except OSError as error:
            self._trouble = error
            self.close()

    def receive(self, seq: int, *, wait: bool) -> Reply | None:
        if self._link is None:
            if wait:
                time.sleep(WAIT_SLICE_S)  # the request is lost; there is nothing to wait on until it is repeated
            return None
        deadline = time.monotonic() + WAIT_SLICE_S if wait else 0.0
        try:
            while True:
                reply = wire.decode_reply(self._link.receive(deadline)[1])
                if reply.seq == seq:
                    return reply
        except TimeoutError:
            pass
        except OSError as error:
            self._trouble = error
            self.close()
        except wire.DecodeError as error:
            self._trouble = OSError(f"a reply could not be read: {error}")
            self.close()
        return None

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class RemoteLeader:
    """By ZeroMQ (DEALER), which connects and connects again by itself."""

    trouble = ""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], pp_rank: int, global_rank: int, endpoint: str) -> None:
        self.pp_rank = pp_rank
        self.global_rank = global_rank
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(WAIT_SLICE_S * 1000)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.connect(endpoint)

    def send(self, payload: bytes) -> None:
        # Again: its queue is full. It has not read for long, and counts as silent.
        with suppress(zmq.Again):
            self._socket.send(payload, zmq.NOBLOCK)

    def receive(self, seq: int, *, wait: bool) -> Reply | None:
        flags = 0 if wait else zmq.NOBLOCK
        try:
            while True:
                try:
                    reply = wire.decode_reply(self._socket.recv(flags))
                except wire.DecodeError:
                    continue
                if reply.seq == seq:
                    return reply
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.close()
