"""Tie a process to the launcher: it ends when the launcher or its parent does, even by SIGKILL.

The standard library only, and cheap to import: it runs in every process of an engine.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path

from kvlaunch.launch.linux import set_parent_death_signal


def tether(launcher_pid: int) -> None:
    """SIGKILL this process as soon as the launcher, or the parent of this process, is gone.

    Call it once in a process, early, from any thread. Two ties, because each has a gap:

    - A daemon thread waits for the end of the launcher. It sees nothing while a C call holds the GIL.
    - The kernel's parent-death signal needs no thread, yet it fires when the *thread* ends that started this process.
      It is set only where that was the parent's main thread, which lives as long as its process.

    Args:
        launcher_pid: process id of the launcher; 0 leaves the thread out.
    """
    if _started_by_main_thread(os.getppid()):
        parent = os.getppid()
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the signal was set
            os.kill(os.getpid(), signal.SIGKILL)
    if launcher_pid > 0:
        threading.Thread(target=_follow, args=(launcher_pid,), name="kvlaunch-tether", daemon=True).start()


def wait_for_end(pid: int) -> None:
    """Block until the process has ended; return at once where there is none."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
    finally:
        os.close(fd)


def _follow(pid: int) -> None:
    wait_for_end(pid)
    os.kill(os.getpid(), signal.SIGKILL)


def _started_by_main_thread(parent: int) -> bool:
    """Whether the parent's main thread started this process; False where the kernel does not tell."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        return False
    return str(os.getpid()) in children.split()
