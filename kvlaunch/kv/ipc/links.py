"""The hop inside a stage: datagrams over a connected SOCK_SEQPACKET unix socket, and the files such sockets live in."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from pathlib import Path

import msgspec

from kvlaunch.kv.ipc import wire

_HEADER = struct.Struct("<QB")
"""(number of the exchange, whether more of this message follows)."""
_FRAGMENT = 60_000
"""Bytes of payload in a datagram: well below the default send buffer, which limits a datagram."""
_PEER_CREDENTIALS = struct.Struct("3i")
_WAIT_SLICE_S = 0.05
"""How often a blocking receive looks at its deadline."""


class LinkClosedError(OSError):
    """The other side is gone."""


class LinkRefusedError(OSError):
    """The leader does not take this one in; the message is its reason."""


class Link:
    """One end of a connection between a stage's leader and a peer. Each message belongs to a numbered exchange."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_HEADER.size + _FRAGMENT)
        self._view = memoryview(self._buffer)

    def limit_waits(self, send_timeout_s: float, wait_slice_s: float = _WAIT_SLICE_S) -> None:
        """Make `receive` look at its deadline every wait_slice_s, and sends give up after send_timeout_s (seconds)."""
        for option, seconds in ((socket.SO_RCVTIMEO, wait_slice_s), (socket.SO_SNDTIMEO, send_timeout_s)):
            whole = int(seconds)
            value = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)

    def send(self, exchange: int, payload: bytes) -> None:
        """Raises LinkClosedError, BlockingIOError (the other side does not read) or another OSError."""
        try:
            if len(payload) <= _FRAGMENT:
                self._sock.send(_HEADER.pack(exchange, 0) + payload)
                return
            for at in range(0, len(payload), _FRAGMENT):
                more = at + _FRAGMENT < len(payload)
                self._sock.send(_HEADER.pack(exchange, more) + payload[at : at + _FRAGMENT])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LinkClosedError("it closed the connection") from error

    def receive(self, deadline: float | None = None, *, awake_s: float = 0.0) -> tuple[int, bytes | memoryview]:
        """The next message and its exchange. A view is good until the next call.

        Args:
            deadline: time.monotonic() until which to wait, for links with limited waits; None: for ever.
            awake_s: seconds to stay awake, giving way to others, before going to sleep: for an answer that is due
                sooner than a sleeping processor wakes.

        Raises:
            TimeoutError: nothing came.
            LinkClosedError: the other side is gone.
        """
        number, more, size = self._datagram(deadline, awake_s)
        if not more:
            return number, self._view[_HEADER.size : size]
        parts = bytearray(self._view[_HEADER.size : size])
        while more:
            number, more, size = self._datagram(deadline)
            parts += self._view[_HEADER.size : size]
        return number, bytes(parts)

    def _datagram(self, deadline: float | None, awake_s: float = 0.0) -> tuple[int, int, int]:
        began = time.monotonic()
        while True:
            now = time.monotonic()
            late = deadline is not None and now >= deadline
            awake = now - began < awake_s
            try:
                size = self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT if late or awake else 0)
            except BlockingIOError:
                if late:
                    raise TimeoutError from None
                if awake:
                    os.sched_yield()
                continue
            except ConnectionResetError as error:
                raise LinkClosedError("it closed the connection") from error
            if size < _HEADER.size:
                raise LinkClosedError("it closed the connection")
            number, more = _HEADER.unpack_from(self._buffer)
            return number, more, size

    def gone(self) -> bool:
        """Whether the other side has closed the connection (messages that it sent before may still be unread)."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` gets LinkClosedError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise
        self._sock.close()


def connect(path: Path, hello: msgspec.Struct, timeout_s: float) -> Link:
    """Connect to a stage's leader and be taken in.

    Args:
        hello: Hello or HelloRequester.
        timeout_s: seconds to wait for its answer.

    Raises:
        LinkRefusedError: it does not want us.
        OSError: nobody listens there, or there is no answer.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(os.fspath(path))
        link = Link(sock)
        link.send(0, wire.encode(hello))
        refusal = wire.decode_welcome(link.receive()[1]).error
        if refusal is not None:
            raise LinkRefusedError(refusal)
        sock.settimeout(None)
    except wire.DecodeError as error:
        sock.close()
        raise LinkRefusedError(f"no welcome came, but: {error}") from error
    except OSError:
        sock.close()
        raise
    return link


def peer_uid(sock: socket.socket) -> int:
    """User of the process on the other side of a connected unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid: int = _PEER_CREDENTIALS.unpack(raw)[1]
    return uid


def claim_path(path: Path, kind: int) -> None:
    """Make room for a socket at `path`: remove what a dead process left there.

    Args:
        kind: type of the socket that may be there (SOCK_STREAM, SOCK_SEQPACKET).

    Raises:
        OSError: somebody listens there (EADDRINUSE), or what is there is no socket (EEXIST).
    """
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise OSError(errno.EEXIST, "there is a file that is no socket", str(path))
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            # A full backlog (EAGAIN) or a socket of another type (EPROTOTYPE) is a live one.
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):
                raise
    raise OSError(errno.EADDRINUSE, "another process listens there", str(path))


def listen_seqpacket(path: Path, backlog: int) -> socket.socket:
    """A listening SOCK_SEQPACKET socket that only this user may connect to.

    Raises:
        OSError: see `claim_path`.
    """
    claim_path(path, socket.SOCK_SEQPACKET)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(os.fspath(path))
        path.chmod(0o600)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock
