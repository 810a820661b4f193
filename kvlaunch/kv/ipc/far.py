"""The hop inside a stage where a rank is on another host than its leader: CurveZMQ, from the leader to the rank."""

from __future__ import annotations

import struct
import threading
import time
from contextlib import suppress

import zmq

from kvlaunch.kv.ipc import network
from kvlaunch.kv.ipc.links import LinkClosedError
from kvlaunch.kv.ipc.probe import Probe
from kvlaunch.kv.ipc.roles import rank_role
from kvlaunch.secret import Secret, require_secret

_NUMBER = struct.Struct("<Q")
"""Number of the exchange: the rank puts that of a request in front of its answer."""
_SLICE_MS = 20
REPEAT_S = 0.1
"""Seconds without an answer after which a request is sent again: a connection that broke may have lost it. A rank
answers an operation that it has applied, and does not apply it again."""
_RECONNECT_MS = 20
_RECONNECT_MOST_MS = 500


def split_exchange(raw: bytes) -> tuple[bytes, memoryview]:
    """The number of the exchange as it came, and what follows it."""
    return raw[: _NUMBER.size], memoryview(raw)[_NUMBER.size :]


class FarLink:
    """A leader's end of the connection to a rank on another host; used as a `Link` is. ZeroMQ keeps it up.

    Args:
        global_rank: of the other side.
        endpoint: `tcp://HOST:PORT` of its `FarPeer`.
        secret, run: from which the keys are made.

    Raises:
        ConfigError: there is no secret.
        OSError: the host's name is not known.
        ValueError: not such an endpoint.
    """

    def __init__(self, global_rank: int, endpoint: str, *, secret: Secret | None, run: str) -> None:
        known = require_secret(secret, f"The KV memory of rank {global_rank} at {endpoint}")
        self._endpoint = endpoint
        self._address = network.numeric(endpoint)
        self._last = (0, b"")
        self._repeat_at = 0.0
        self._probe: Probe | None = None
        # Operations come one after the other, but `close` comes whenever it comes, and a socket is for one thread.
        self._lock = threading.Lock()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        for option, value in (
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS),
            (zmq.RCVTIMEO, _SLICE_MS),
        ):
            self._socket.setsockopt(option, value)
        network.connect(self._socket, self._address, secret=known, run=run, role=rank_role(global_rank))

    def limit_waits(self, send_timeout_s: float) -> None:
        """Sends never wait, and a receive looks at its deadline often."""

    def send(self, exchange: int, payload: bytes) -> None:
        """Raises LinkClosedError where it has been closed. What cannot be sent just now is sent again by `receive`."""
        self._end_probe()
        self._last = (exchange, payload)
        self._send()

    def receive(self, deadline: float) -> tuple[int, memoryview]:
        """The next message and its exchange; meanwhile the last request is repeated.

        Args:
            deadline: time.monotonic() until which to wait.

        Raises:
            TimeoutError: nothing came; its text says where from, and what is known of the reason.
            LinkClosedError: it was closed here.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise LinkClosedError("the connection was closed")
                now = time.monotonic()
                with suppress(zmq.Again):
                    raw = self._socket.recv(0 if now < deadline else zmq.NOBLOCK)
                    if len(raw) >= _NUMBER.size:
                        number, payload = split_exchange(raw)
                        return _NUMBER.unpack(number)[0], payload
                    continue
            if now >= deadline:
                raise TimeoutError(f"{self._endpoint}{f': {self._probe.finding}' if self._probe else ''}")
            if now >= self._repeat_at:
                if self._probe is None:
                    self._probe = Probe(self._address)
                self._send()

    def gone(self) -> bool:
        """Never: a rank that has ended takes its stage with it, and a connection that broke is made anew."""
        return self._closed

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` gets LinkClosedError. May be called twice."""
        self._closed = True
        with self._lock:
            self._end_probe()
            self._socket.close()
        self._context.term()

    def _send(self) -> None:
        exchange, payload = self._last
        self._repeat_at = time.monotonic() + REPEAT_S
        with self._lock:
            if self._closed:
                raise LinkClosedError("the connection was closed")
            with suppress(zmq.Again):  # its queue is full: it has not read for long, and counts as silent
                self._socket.send(_NUMBER.pack(exchange) + payload, zmq.NOBLOCK)

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
