"""Host memory against the kernel: what is resident, what is guarded, what happens when there is not enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from kvlaunch.kv.memory import host
from kvlaunch.kv.memory.base import MemoryMapError
from kvlaunch.kv.memory.host import HostBackend, HostRegion
from kvlaunch.kv.memory.smaps import resident_bytes

PAGE = 4096
MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["guard", "open"])
def region(request: pytest.FixtureRequest) -> Iterator[HostRegion]:
    region = HostBackend(guard=request.param).reserve(64 * MIB)
    yield region
    region.close()


def resident(region: HostRegion) -> int:
    return resident_bytes(os.getpid(), region.address, region.nbytes)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


def test_exactly_what_is_mapped_is_resident(region: HostRegion) -> None:
    assert resident(region) == 0
    region.map_many([(0, 3 * PAGE), (8 * MIB, 5 * MIB), (32 * MIB, PAGE)])
    assert resident(region) == region.mapped_bytes == 5 * MIB + 4 * PAGE
    region.unmap(9 * MIB, MIB)
    assert resident(region) == region.mapped_bytes == 4 * MIB + 4 * PAGE
    region.unmap_many([(0, 3 * PAGE), (8 * MIB, MIB), (10 * MIB, 3 * MIB), (32 * MIB, PAGE)])
    assert resident(region) == 0


def test_neighbouring_regions_are_told_apart() -> None:
    regions = [HostBackend(guard=False).reserve(MIB) for _ in range(4)]
    try:
        for i, region in enumerate(regions):
            region.map(0, (i + 1) * 16 * PAGE)
        assert [resident(region) for region in regions] == [(i + 1) * 16 * PAGE for i in range(4)]
    finally:
        for region in regions:
            region.close()


def test_a_terabyte_can_be_reserved() -> None:
    region = HostBackend().reserve(1 << 40)
    try:
        region.map((1 << 40) - PAGE, PAGE)
        assert resident(region) == PAGE
    finally:
        region.close()


def test_a_write_while_unmapped_does_not_show_after_mapping_without_the_guard() -> None:
    region = HostBackend(guard=False).reserve(16 * PAGE)
    try:
        tensor = region.tensor()
        tensor[0] = 1
        region.map(0, PAGE)
        assert int(tensor[0]) == 0
    finally:
        region.close()


@pytest.mark.parametrize(
    ("touch", "dies"),
    [("before", True), ("mapped", False), ("after", True), ("beyond", True), ("below", True), ("neighbour", True)],
)
def test_the_guard_kills_who_touches_unmapped_memory(touch: str, dies: bool) -> None:
    done = run(f"""
        import ctypes
        from kvlaunch.kv.memory.host import HostBackend
        region = HostBackend(guard=True).reserve(4 * {PAGE})
        def write(at):
            ctypes.memset(region.address + at, 1, 1)
        if {touch!r} == "before":
            write(0)
        region.map(0, {PAGE})
        write({PAGE - 1})
        if {touch!r} == "neighbour":
            write({PAGE})
        if {touch!r} == "beyond":
            region.map({PAGE}, 3 * {PAGE})
            write(4 * {PAGE})
        if {touch!r} == "below":
            write(-1)
        if {touch!r} == "after":
            region.unmap(0, {PAGE})
            write(0)
        print("alive")
    """)
    assert done.returncode == (-signal.SIGSEGV if dies else 0), done.stderr
    assert ("alive" in done.stdout) != dies


def test_a_shortage_is_an_error_and_leaves_the_region_as_it_was() -> None:
    done = run(f"""
        import os, resource
        from kvlaunch.kv.memory.base import MemoryMapError
        from kvlaunch.kv.memory.host import HostBackend
        from kvlaunch.kv.memory.smaps import resident_bytes
        region = HostBackend(guard=True).reserve(1 << 32)
        region.map(0, {MIB})
        used = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * {MIB}, resource.RLIM_INFINITY))
        try:
            region.map_many([(4 * {MIB}, {MIB}), (8 * {MIB}, 1024 * {MIB})])
        except MemoryMapError as error:
            assert error.errno == 12 and "ENOMEM" in str(error), error
        else:
            raise SystemExit("no error")
        assert region.mapped_bytes == {MIB} == resident_bytes(os.getpid(), region.address, region.nbytes)
        region.map(4 * {MIB}, {MIB})
        assert region.mapped_bytes == 2 * {MIB} == resident_bytes(os.getpid(), region.address, region.nbytes)
    """)
    assert done.returncode == 0, done.stderr


def test_address_space_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(MemoryMapError, match="reserving"):
        HostBackend().reserve(1 << 60)


class Libc:
    """The C library, where one call of madvise or mprotect can be made to fail."""

    def __init__(self, fail: str, codes: list[int | None]) -> None:
        self._fail, self._codes = fail, codes
        self.real = host._libc

    def __getattr__(self, name: str) -> object:
        real = getattr(self.real, name)
        if name != self._fail:
            return real

        def call(address: int, nbytes: int, what: int) -> int:
            populate_or_protect = name == "mprotect" or what in (host.MADV_POPULATE_WRITE, host.MADV_DONTNEED)
            code = self._codes.pop(0) if self._codes and populate_or_protect else None
            if code is not None:
                host.ctypes.set_errno(code)
                return -1
            return int(real(address, nbytes, what))

        return call


@pytest.mark.parametrize("codes", [[22], [4, 11, None]], ids=["unknown-advice", "interrupted"])
def test_committing_works_without_the_advice_and_through_interruptions(
    monkeypatch: pytest.MonkeyPatch, codes: list[int | None]
) -> None:
    region = HostBackend().reserve(16 * PAGE)
    monkeypatch.setattr(host, "_libc", Libc("madvise", codes))
    region.map(PAGE, 2 * PAGE)
    monkeypatch.undo()
    assert not codes
    assert resident(region) == 2 * PAGE
    region.close()


def test_a_failed_map_takes_back_what_it_had_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    region = HostBackend().reserve(64 * PAGE)
    monkeypatch.setattr(host, "_libc", Libc("madvise", [None, 12]))
    with pytest.raises(MemoryMapError, match="committing"):
        region.map_many([(0, 4 * PAGE), (8 * PAGE, PAGE)])
    monkeypatch.undo()
    assert region.mapped_bytes == resident(region) == 0
    region.map(0, 4 * PAGE)
    region.close()


@pytest.mark.parametrize(("call", "codes"), [("mprotect", [None, 12]), ("madvise", [None, 22])])
def test_a_failed_unmap_leaves_all_of_it_mapped_and_usable(
    monkeypatch: pytest.MonkeyPatch, call: str, codes: list[int | None]
) -> None:
    region = HostBackend().reserve(64 * PAGE)
    region.map_many([(0, PAGE), (8 * PAGE, PAGE)])
    tensor = region.tensor()
    tensor[8 * PAGE] = 5
    monkeypatch.setattr(host, "_libc", Libc(call, codes))
    with pytest.raises(MemoryMapError):
        region.unmap_many([(0, PAGE), (8 * PAGE, PAGE)])
    monkeypatch.undo()
    assert region.mapped_bytes == 2 * PAGE
    assert int(tensor[8 * PAGE]) == 5
    tensor[0] = 1  # would be a SIGSEGV
    region.unmap_many([(0, PAGE), (8 * PAGE, PAGE)])
    assert resident(region) == 0
    region.close()


def test_the_tensor_keeps_the_region() -> None:
    region = HostBackend().reserve(PAGE)
    region.map(0, PAGE)
    tensor = region.tensor()
    address = region.address
    del region
    tensor[0] = 3
    assert tensor.data_ptr() == address
    assert int(tensor[0]) == 3


@pytest.mark.parametrize("granularity", [0, -4096, 1000, 4097])
def test_granularity_is_a_multiple_of_the_page(granularity: int) -> None:
    with pytest.raises(ValueError, match="granularity"):
        HostBackend(granularity=granularity)
