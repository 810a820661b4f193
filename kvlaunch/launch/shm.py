"""Shared memory segments of a run's processes, and their named semaphores, found by what they have mapped or open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from kvlaunch.launch.procfs import all_pids

SHM = Path("/dev/shm")
KEPT_PREFIX = "kvlaunch"
"""Segments that outlive a run on purpose: what several runs share."""
SETTLE_S = 0.2


class Segment(msgspec.Struct, frozen=True, order=True):
    """One file of /dev/shm."""

    name: str
    inode: int


_File = tuple[int, int]
"""Device and inode. The inode alone is not enough: a container's own shared memory counts from the start again."""


class ShmNews:
    """Tells whether segments came or went, by the time of their folder."""

    def __init__(self) -> None:
        self._known = 0

    def any(self) -> bool:
        """Whether something changed since the last call. Changes of the last SETTLE_S seconds count twice: a process
        makes a file first and maps it then, and the clock of the file system has ticks."""
        try:
            changed_at = SHM.stat().st_mtime_ns
        except OSError:
            return False
        if changed_at == self._known:
            return False
        if time.time_ns() - changed_at > SETTLE_S * 1e9:
            self._known = changed_at
        return True


def segments_of(pids: Iterable[int]) -> set[Segment]:
    """Segments that have a name still and that one of the processes has mapped or open."""
    used: set[_File] = set()
    for pid in pids:
        used |= _files_of(pid)
    if not used:
        return set()
    device = SHM.stat().st_dev
    return {Segment(entry.name, entry.inode()) for entry in _entries() if (device, entry.inode()) in used}


def _entries() -> list[os.DirEntry[str]]:
    try:
        with os.scandir(SHM) as entries:
            return [entry for entry in entries if not entry.name.startswith(KEPT_PREFIX)]
    except OSError:
        return []


def _files_of(pid: int) -> set[_File]:
    """The files in SHM that a process has mapped or open, by whichever name.

    The C library gives a semaphore its name after mapping it under another, which the process is then said to have
    mapped, and deleted.
    """
    prefix = f"{SHM}/"
    files = set()
    try:
        with Path(f"/proc/{pid}/maps").open(errors="replace") as lines:
            for line in lines:
                if prefix in line:
                    _, _, _, device, inode, _ = line.split(maxsplit=5)
                    major, minor = (int(number, 16) for number in device.split(":"))
                    files.add((os.makedev(major, minor), int(inode)))
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return files  # it ended meanwhile, or is not ours to look into
    for fd in descriptors:
        with suppress(OSError):  # closed meanwhile
            if str(fd.readlink()).startswith(prefix):
                st = fd.stat()
                files.add((st.st_dev, st.st_ino))
    return files


def existing(segments: Iterable[Segment]) -> set[Segment]:
    """Those that are still what was recorded: this user's, and not another file of the same name."""
    return {segment for segment in segments if _is_ours(segment)}


def unlink_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Remove the segments that still are what was recorded and that no live process uses. Returns those removed."""
    ours = existing(segments)
    if not ours:
        return []
    ours -= segments_of(all_pids())
    for segment in ours:
        (SHM / segment.name).unlink(missing_ok=True)
    return sorted(ours)


def _is_ours(segment: Segment) -> bool:
    try:
        st = (SHM / segment.name).lstat()
    except OSError:
        return False
    return st.st_ino == segment.inode and st.st_uid == os.getuid()
