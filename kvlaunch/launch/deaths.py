"""Which rank ended first: a rank that was killed or crashed leaves no record of its own."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping

import msgspec

from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.procfs import read_process
from kvlaunch.launch.state import write_atomically


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a rank's process, whatever its reason."""

    t: float
    """Seconds since the Unix epoch."""
    rank: int
    pid: int


def save_death(paths: RunPaths, death: Death) -> None:
    """For the agent, which tells the other nodes."""
    write_atomically(paths.death, msgspec.json.encode(death))


def load_death(paths: RunPaths) -> Death | None:
    """The death that was noted in this epoch of the engine, or None."""
    try:
        return msgspec.json.decode(paths.death.read_bytes(), type=Death)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


ENGINE = -1
"""Stands for the engine's own process among the ranks."""


class RankWatch:
    """Holds a descriptor of each rank's process and of the engine's, and knows which ended first."""

    def __init__(self) -> None:
        self._first: Death | None = None
        self._fds: dict[int, int] = {}
        """Descriptor -> global rank, or ENGINE."""
        self._pids: dict[int, int] = {}

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when a rank ends."""
        return list(self._fds)

    @property
    def first(self) -> Death | None:
        """The first rank that ended; None where none has, or the engine's own process went before."""
        return self._first if self._first and self._first.rank != ENGINE else None

    def knows(self, rank: int) -> bool:
        return rank in self._pids

    def follow(self, pids: Mapping[int, int]) -> None:
        """Watch these processes too: global rank, or ENGINE, -> process id."""
        for rank, pid in pids.items():
            if self._pids.get(rank) == pid:
                continue
            self._pids[rank] = pid
            with contextlib.suppress(OSError):  # it has ended already: too late to tell when
                self._fds[os.pidfd_open(pid)] = rank

    def look(self) -> None:
        """Note who has ended since."""
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            rank = self._fds.pop(fd)
            os.close(fd)
            if self._first is None:
                # Of those that ended together the engine counts as the first: its ranks end with it.
                first = ENGINE if self._engine_ends() else rank
                self._first = Death(t=time.time(), rank=first, pid=self._pids[first])

    def _engine_ends(self) -> bool:
        """Whether the engine's main thread has ended; its descriptor tells of the end of its last thread only."""
        if ENGINE not in self._pids:
            return False
        engine = read_process(self._pids[ENGINE])
        return engine is None or engine.zombie

    def close(self) -> None:
        """Forget everything; following may begin anew."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._pids.clear()
        self._first = None
