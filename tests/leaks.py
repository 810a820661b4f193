"""What a test run leaves behind: processes, sockets, shared memory, network namespaces.

Only what is ours counts, since other people's processes share the machine. A process is ours if it descends from
pytest or carries this session's mark in its environment; a shared-memory segment if such a process was seen to use it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SESSION_MARK = "KVLAUNCH_TEST_SESSION"
"""Set for the whole test session, so that every process started by a test inherits it, re-parented or not."""
SHM = Path("/dev/shm")
NETNS = Path("/run/netns")
NETNS_PREFIX = "kvl"
"""Tests name their network namespaces so; others are somebody else's."""
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers of Python's own that live as long as pytest does, on purpose."""


def is_helper(process: psutil.Process) -> bool:
    try:
        return any(helper in word for word in process.cmdline() for helper in _HELPERS)
    except psutil.Error:
        return False


def our_processes(mark: str) -> list[psutil.Process]:
    """Live processes of this test session, pytest itself and Python's own helpers left out. Zombies count."""
    me = psutil.Process()
    found = {process.pid: process for process in me.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid not in found and process.pid != me.pid and _has_mark(process, mark):
            found[process.pid] = process
    return [process for process in found.values() if process.is_running() and not is_helper(process)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(SESSION_MARK) == mark
    except (psutil.Error, OSError):
        return False


def child_pids() -> set[int]:
    """Children of pytest itself. Reads a few small files, so it may be asked around every test."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(word) for word in (task / "children").read_text().split()}
        except FileNotFoundError:
            continue  # the thread ended meanwhile
    return found


def new_children(before: set[int]) -> list[str]:
    """One line for each child that was not there before."""
    new = [psutil.Process(pid) for pid in child_pids() - before if psutil.pid_exists(pid)]
    return [describe(process) for process in new if not is_helper(process)]


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({process.status()}): {' '.join(process.cmdline())[:160] or process.name()}"
    except psutil.Error:
        return f"process {process.pid}"


def shm_used_by(pids: Iterable[int]) -> set[str]:
    """Names of the shared-memory segments and semaphores that these processes have mapped or open.

    Found by their inodes: a semaphore is mapped under a name that it loses. The shared memory of another namespace has
    inodes of its own, and is not looked at.
    """
    inodes: set[int] = set()
    prefix = f"{SHM}/"
    device = SHM.stat().st_dev
    number = f"{os.major(device):02x}:{os.minor(device):02x}"
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue  # it ended meanwhile
        words = [line.split() for line in maps.splitlines() if prefix in line]
        inodes |= {int(word[4]) for word in words if word[3] == number}
        for fd in descriptors:
            with suppress(OSError):  # closed meanwhile
                if str(fd.readlink()).startswith(prefix) and fd.stat().st_dev == device:
                    inodes.add(fd.stat().st_ino)
    return {entry.name for entry in os.scandir(SHM) if entry.inode() in inodes}


def shm_left_since(began_ns: int) -> set[str]:
    """Names of this user's segments and semaphores that were made since and that no process uses.

    It finds what lived too shortly for ShmWatch, which looks now and then.

    Args:
        began_ns: time.time_ns().
    """
    made = set()
    for path in SHM.iterdir():
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        if stat.st_uid == os.getuid() and stat.st_ctime_ns >= began_ns:
            made.add(path.name)
    return made - shm_used_by(psutil.pids()) if made else made


class ShmWatch:
    """Notes, every `interval_s` seconds, which segments the processes of this session use."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self.seen: set[str] = set()
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shm-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        # Descendants only: reading the environment of every process each second would cost more than it finds.
        children = psutil.Process().children(recursive=True)
        self.seen |= shm_used_by([os.getpid(), *(child.pid for child in children)])

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()


def sockets_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


def netns_names() -> set[str]:
    return {path.name for path in NETNS.glob(f"{NETNS_PREFIX}*")}


def left_behind(
    mark: str, runtime_dir: Path, shm_seen: set[str], netns_before: set[str], began_ns: int | None = None
) -> list[str]:
    """One line for each thing that is left of this session, which began at began_ns."""
    if began_ns is not None:
        shm_seen = shm_seen | shm_left_since(began_ns)
    left = [describe(process) for process in our_processes(mark)]
    left += [f"socket {path}" for path in sockets_under(runtime_dir)]
    left += [f"shared memory {SHM / name}" for name in sorted(shm_seen) if (SHM / name).exists()]
    left += [f"network namespace {name}" for name in sorted(netns_names() - netns_before)]
    return left


def wait_until_gone(look: Callable[[], list[str]], timeout_s: float) -> list[str]:
    """Look until nothing is left or the time is over; stragglers of the last test need a moment."""
    deadline = time.monotonic() + timeout_s
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
