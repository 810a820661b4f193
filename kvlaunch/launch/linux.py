"""prctl(2), which the standard library does not offer."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}, {value}): {os.strerror(errno)}")


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, instead of those of process 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """This process gets `signum` when the *thread* that started it ends (PR_SET_PDEATHSIG). Kept over exec."""
    _prctl(PR_SET_PDEATHSIG, signum)
