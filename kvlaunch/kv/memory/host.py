"""Host memory: an anonymous private mapping whose pages are committed and given back through mprotect and madvise."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlaunch.kv.memory.base import MemoryMapError, Region, check_size

if TYPE_CHECKING:
    import torch

PROT_NONE = 0
PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_NORESERVE = 0x4000
MADV_DONTNEED = 4
MADV_NOHUGEPAGE = 15
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23  # Linux 5.14
PR_SET_VMA = 0x53564D41
PR_SET_VMA_ANON_NAME = 0
REGION_NAME = b"kvlaunch-kv"
"""How the kernel calls the mapping in /proc/<pid>/smaps, where it supports names."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_POPULATE_ATTEMPTS = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_char_p)


def _failure(what: str, nbytes: int) -> MemoryMapError:
    code = ctypes.get_errno()
    message = f"{what} of {nbytes} bytes of host memory failed: {os.strerror(code)} ({errno.errorcode.get(code, code)})"
    if code == errno.ENOMEM:
        message += "; out of memory, over a limit (ulimit -d, -v), or more mappings than vm.max_map_count"
    return MemoryMapError(message, errno=code)


class HostBackend:
    """Anonymous host memory.

    Args:
        guard: unmapped bytes are PROT_NONE, so that a touch of them kills the process with SIGSEGV. Without it they
            read as zeros, and a write to them takes memory that nobody counts.
        granularity: bytes, a multiple of the system's page (and by default that).
    """

    def __init__(self, guard: bool = True, *, granularity: int | None = None) -> None:
        self.guard = guard
        self._granularity = mmap.PAGESIZE if granularity is None else granularity
        if self._granularity <= 0 or self._granularity % mmap.PAGESIZE:
            raise ValueError(f"granularity {granularity} is not a positive multiple of the page, {mmap.PAGESIZE} bytes")

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, nbytes: int) -> HostRegion:
        check_size(nbytes, self._granularity)
        return HostRegion(nbytes, self._granularity, guard=self.guard)


class HostRegion(Region):
    """A region of host memory, between two pages that are never accessible.

    Those two catch an overrun, and keep the region's mapped parts from being joined with a neighbour in the kernel's
    list of mappings, so that its resident bytes can be read from /proc.
    """

    def __init__(self, nbytes: int, granularity: int, *, guard: bool) -> None:
        total = nbytes + 2 * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        base = _libc.mmap(None, total, PROT_NONE, flags, -1, 0)
        if base in (None, _MAP_FAILED):
            raise _failure("reserving address space", nbytes)
        super().__init__(base + mmap.PAGESIZE, nbytes, granularity)
        self._base = base
        self._total = total
        self._guard = guard
        # Huge pages would commit (and leave committed) more than was asked for. A kernel without them says EINVAL.
        _libc.madvise(base, total, MADV_NOHUGEPAGE)
        _libc.madvise(base, total, MADV_DONTDUMP)
        _libc.prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, base, total, REGION_NAME)
        if not guard and _libc.mprotect(self.address, nbytes, PROT_READ_WRITE):
            error = _failure("making accessible", nbytes)
            self.close()
            raise error

    def tensor(self) -> torch.Tensor:
        import torch

        buffer = (ctypes.c_byte * self.nbytes).from_address(self.address)
        buffer._region = self  # type: ignore[attr-defined]  # the tensor keeps the buffer, the buffer the region
        return torch.frombuffer(buffer, dtype=torch.int8)

    def _commit(self, spans: Sequence[tuple[int, int]]) -> None:
        for i, (start, end) in enumerate(spans):
            try:
                self._commit_one(self.address + start, end - start)
            except MemoryMapError:
                for done_start, done_end in spans[: i + 1]:
                    _libc.madvise(self.address + done_start, done_end - done_start, MADV_DONTNEED)
                    if self._guard:
                        _libc.mprotect(self.address + done_start, done_end - done_start, PROT_NONE)
                raise

    def _commit_one(self, address: int, nbytes: int) -> None:
        if self._guard:
            if _libc.mprotect(address, nbytes, PROT_READ_WRITE):
                raise _failure("making accessible", nbytes)
        else:
            # Without the guard somebody may have written here while it was not mapped.
            _libc.madvise(address, nbytes, MADV_DONTNEED)
        for _ in range(_POPULATE_ATTEMPTS):
            if not _libc.madvise(address, nbytes, MADV_POPULATE_WRITE):
                return
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel that does not know the advice
                ctypes.memset(address, 0, nbytes)
                return
            if code not in (errno.EINTR, errno.EAGAIN):
                break
        raise _failure("committing", nbytes)

    def _release(self, spans: Sequence[tuple[int, int]]) -> None:
        # Protection first: it is the step that can fail (it may split a mapping), and undoing it loses nothing.
        if self._guard:
            for i, (start, end) in enumerate(spans):
                if _libc.mprotect(self.address + start, end - start, PROT_NONE):
                    error = _failure("closing off", end - start)
                    self._reopen(spans[:i])
                    raise error
        for start, end in spans:
            if _libc.madvise(self.address + start, end - start, MADV_DONTNEED):
                error = _failure("giving back", end - start)
                self._reopen(spans)
                raise error

    def _reopen(self, spans: Sequence[tuple[int, int]]) -> None:
        if self._guard:
            for start, end in spans:
                _libc.mprotect(self.address + start, end - start, PROT_READ_WRITE)

    def _dispose(self) -> None:
        _libc.munmap(self._base, self._total)
