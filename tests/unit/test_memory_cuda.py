# ruff: noqa: N802
"""The order in which the CUDA backend calls the driver, against a stand-in that keeps the driver's rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlaunch.kv.memory.base import MemoryMapError
from kvlaunch.kv.memory.cuda import CudaBackend, devices

GRANULE = 2 << 20
BASE = 1 << 40


class Result(SimpleNamespace):
    CUDA_SUCCESS = "ok"


class Driver:
    """Keeps track of handles and mappings as the documentation describes them; breaking a rule fails the test.

    Attributes:
        calls: names in order.
        fail: name -> how many calls still succeed before one fails.
    """

    CUresult = Result
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.zeroed: set[int] = set()
        self.contexts = 0
        self.pending = False
        self._next = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.fail:
                self.fail[name] -= 1
                if self.fail[name] < 0:
                    del self.fail[name]
                    return ("CUDA_ERROR_OUT_OF_MEMORY", None)
            rule = getattr(self, f"do_{name}", None)
            result = rule(*args) if rule else None
            return ("ok",) if result is None else ("ok", result)

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def do_cuDeviceGetCount(self) -> int:
        return 3

    def do_cuDeviceGet(self, index: int) -> int:
        return 100 + index

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> str:
        return f"context of {device}"

    def do_cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> int:
        assert properties.location.id == 1
        return GRANULE

    def do_cuCtxPushCurrent(self, context: str) -> None:
        assert context == "context of 101"
        self.contexts += 1

    def do_cuCtxPopCurrent(self) -> str:
        self.contexts -= 1
        return "context"

    def do_cuStreamCreate(self, flags: int) -> str:
        assert self.contexts
        return "stream"

    def do_cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> int:
        assert nbytes % GRANULE == 0
        assert (address, flags) == (0, 0)
        self.reserved[BASE] = nbytes
        return BASE

    def do_cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> int:
        self._next += 1
        self.handles.add(self._next)
        return self._next

    def do_cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert handle in self.handles
        assert address not in self.mapped
        assert BASE <= address < BASE + self.reserved[BASE]
        self.mapped[address] = handle

    def do_cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> None:
        assert len(access) == count == 1
        granules = set(range(address, address + nbytes, GRANULE))
        assert granules <= set(self.mapped)
        self.accessible |= granules

    def do_cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: str) -> None:
        assert self.contexts
        granules = set(range(address, address + nbytes, GRANULE))
        assert granules <= self.accessible
        assert (value, stream) == (0, "stream")
        self.zeroed |= granules
        self.pending = True

    def do_cuStreamSynchronize(self, stream: str) -> None:
        self.pending = False

    def do_cuMemUnmap(self, address: int, nbytes: int) -> None:
        assert nbytes == GRANULE
        assert not self.pending
        del self.mapped[address]
        self.accessible.discard(address)
        self.zeroed.discard(address)

    def do_cuMemRelease(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        self.handles.remove(handle)

    def do_cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert not self.mapped
        assert self.reserved.pop(address) == nbytes


def memory_calls(driver: Driver) -> list[str]:
    calls = [name for name in driver.calls if name.startswith("cuMem") or name == "cuStreamSynchronize"]
    driver.calls.clear()
    return calls


def test_the_order_of_calls() -> None:
    driver = Driver()
    region = CudaBackend(1, driver=driver).reserve(8 * GRANULE)
    assert region.address == BASE
    assert memory_calls(driver) == ["cuMemGetAllocationGranularity", "cuMemAddressReserve"]
    region.map(GRANULE, 2 * GRANULE)
    piece = ["cuMemCreate", "cuMemMap"]
    assert memory_calls(driver) == [*piece, *piece, "cuMemSetAccess", "cuMemsetD8Async", "cuStreamSynchronize"]
    assert driver.zeroed == driver.accessible == set(driver.mapped) == {BASE + GRANULE, BASE + 2 * GRANULE}
    assert not driver.pending
    region.unmap(2 * GRANULE, GRANULE)
    assert memory_calls(driver) == ["cuMemUnmap", "cuMemRelease"]
    assert region.mapped_bytes == GRANULE
    region.close()
    assert memory_calls(driver) == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    assert not driver.handles
    assert not driver.reserved
    assert driver.contexts == 0


@pytest.mark.parametrize(
    ("call", "succeed"),
    [
        ("cuMemCreate", 0),
        ("cuMemCreate", 2),
        ("cuMemMap", 0),
        ("cuMemMap", 2),
        ("cuMemSetAccess", 0),
        ("cuMemSetAccess", 1),
        ("cuMemsetD8Async", 1),
        ("cuStreamSynchronize", 0),
    ],
)
def test_a_failed_map_gives_everything_back(call: str, succeed: int) -> None:
    driver = Driver()
    region = CudaBackend(1, driver=driver).reserve(8 * GRANULE)
    region.map(7 * GRANULE, GRANULE)
    driver.fail[call] = succeed
    with pytest.raises(MemoryMapError, match=f"{call} failed on CUDA device 1: CUDA_ERROR_OUT_OF_MEMORY"):
        region.map_many([(0, 2 * GRANULE), (4 * GRANULE, 2 * GRANULE)])
    assert set(driver.mapped) == {BASE + 7 * GRANULE}
    assert len(driver.handles) == 1
    assert region.mapped_bytes == GRANULE
    assert driver.contexts == 0
    region.map_many([(0, 2 * GRANULE), (4 * GRANULE, 2 * GRANULE)])
    assert len(driver.mapped) == 5


def test_granularity_and_devices() -> None:
    assert CudaBackend(1, driver=Driver()).granularity == GRANULE
    assert CudaBackend(1, driver=Driver(), granularity=2 * GRANULE).granularity == 2 * GRANULE
    with pytest.raises(ValueError, match=str(GRANULE)):
        CudaBackend(1, driver=Driver(), granularity=4096)
    driver = Driver()
    assert devices(driver) == 3
    driver.fail["cuInit"] = 0
    assert devices(driver) == 0
