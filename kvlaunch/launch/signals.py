"""Signals as something to wait for, so that no handler interrupts what the launcher is doing."""

from __future__ import annotations

import select
import signal
import socket
import time
from types import FrameType, TracebackType
from typing import Any, Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BOUNCE_S = 0.5
"""Wrappers such as `make` or `uv run` may pass a Ctrl-C on that the terminal has already delivered."""


class Signals:
    """While entered, SIGINT, SIGTERM and SIGHUP are noted and wake up `wait`. For the main thread."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The signal that asked for the end."""
        self.kill_now = False
        """Ctrl-C came when the end had already been asked for."""
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for signum in ENDING:
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # started under nohup(1): it shall outlive the terminal
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._read.close()
        self._write.close()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(signum)
            self._first_at = time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._first_at > BOUNCE_S:
            self.kill_now = True

    def wait(self, timeout_s: float, *fds: int) -> None:
        """Return after `timeout_s` seconds, or sooner: on a signal, or when one of the descriptors is readable."""
        poll = select.poll()
        for fd in (self._read.fileno(), *fds):
            poll.register(fd, select.POLLIN)
        if any(fd == self._read.fileno() for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)):
            try:
                self._read.recv(4096)
            except BlockingIOError:
                return
