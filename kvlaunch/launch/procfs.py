"""Processes as /proc shows them. The standard library only: it is imported next to an engine too.

A process is known by its id and its start time together: the kernel reuses ids, never the pair.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

Identity = tuple[int, int]
"""(process id, start time in clock ticks since boot)."""


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    ppid: int
    session: int
    start_time: int
    """Clock ticks since boot, field 22 of /proc/<pid>/stat (proc_pid_stat(5))."""
    zombie: bool

    @property
    def identity(self) -> Identity:
        return self.pid, self.start_time


def read_process(pid: int) -> Process | None:
    """The process, or None where there is none of that id."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rfind(")") + 2 :].split()
    return Process(
        pid=pid, ppid=int(fields[1]), session=int(fields[3]), start_time=int(fields[19]), zombie=fields[0] in "ZX"
    )


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def scan() -> dict[int, Process]:
    """Every process that can be seen, by its id."""
    found = (read_process(pid) for pid in all_pids())
    return {process.pid: process for process in found if process is not None}


def identity_of(pid: int) -> Identity | None:
    """(pid, start time), or None where there is no such process."""
    process = read_process(pid)
    return process.identity if process else None


def is_alive(identity: Identity) -> bool:
    """Whether this very process runs (a zombie does not)."""
    process = read_process(identity[0])
    return process is not None and not process.zombie and process.start_time == identity[1]


def descendants(roots: Iterable[int], table: Mapping[int, Process]) -> set[int]:
    """Process ids of all children, grandchildren and so on; the roots themselves are not among them."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def environ_has(pid: int, name: str, value: str) -> bool:
    """Whether the process was started with name=value (a process may overwrite this memory: no proof of absence)."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return os.fsencode(f"{name}={value}") in data.split(b"\0")


def command_of(pid: int) -> str:
    """The command line with spaces between its words, or empty where it cannot be read."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return " ".join(data.decode(errors="replace").split("\0")).strip()


def send(identity: Identity, signum: int) -> bool:
    """Signal this very process. False where it is gone or out of reach."""
    try:
        fd = os.pidfd_open(identity[0])
    except OSError:
        return False
    try:
        # The descriptor holds one process for good; only now is the start time worth comparing.
        if identity_of(identity[0]) != identity:
            return False
        signal.pidfd_send_signal(fd, signum)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def kill_all(find: Callable[[], Iterable[Process]], *, within_s: float) -> list[Process]:
    """SIGKILL what `find` returns until it returns no live process. Zombie children of this process are collected.

    A process may start another between two looks, hence the repetition.

    Args:
        within_s: give up after so many seconds (a process in an uninterruptible sleep outlives SIGKILL).

    Returns:
        What is still alive then.
    """
    deadline = time.monotonic() + within_s
    pause = 0.005
    while True:
        alive = [p for p in find() if not p.zombie]
        for process in alive:
            send(process.identity, signal.SIGKILL)
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def collect_orphans(keep: Iterable[int] = ()) -> None:
    """Collect the exit status of ended children, so that they do not stay as zombies.

    Args:
        keep: children whose status somebody else waits for.
    """
    kept = set(keep)
    me = os.getpid()
    for process in scan().values():
        if process.ppid == me and process.zombie and process.pid not in kept:
            try:
                os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                continue
