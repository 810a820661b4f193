"""Device memory through the CUDA driver's virtual memory API. No GPU has run this yet.

It is written from the driver API's documentation (group "Virtual Memory Management") and its order of calls is tested
against a stand-in for the driver; whoever runs it on a device first should run the backends' contract suite.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvlaunch.kv.memory.base import MemoryMapError, Region, check_size

if TYPE_CHECKING:
    import torch


def _driver() -> Any:
    """The module cuda.bindings.driver.

    Raises:
        ImportError: the package cuda-bindings is not installed.
    """
    from cuda.bindings import driver

    return driver


def devices(driver: Any = None) -> int:
    """Number of CUDA devices that this process sees; 0 where there is no driver."""
    cuda = driver or _driver()
    error, *_ = cuda.cuInit(0)
    if error != cuda.CUresult.CUDA_SUCCESS:
        return 0
    error, count = cuda.cuDeviceGetCount()
    return int(count) if error == cuda.CUresult.CUDA_SUCCESS else 0


class _Cuda:
    """The driver with errors as exceptions, and the device's primary context, which torch uses too."""

    def __init__(self, driver: Any, device: int) -> None:
        self.api = driver
        self.index = device
        self.call("cuInit", 0)
        self.device = self.call("cuDeviceGet", device)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        self.properties = driver.CUmemAllocationProp()
        self.properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.properties.location = location
        self.access = driver.CUmemAccessDesc()
        self.access.location = location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        # A stream of our own that does not wait for the engine's: zeroing must not stall behind its kernels.
        with self.current():
            self.stream = self.call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def call(self, name: str, *args: Any) -> Any:
        """Call the driver; its result, or None.

        Raises:
            MemoryMapError: the driver says no.
        """
        error, *result = getattr(self.api, name)(*args)
        if error != self.api.CUresult.CUDA_SUCCESS:
            raise MemoryMapError(f"{name} failed on CUDA device {self.index}: {getattr(error, 'name', error)}")
        return result[0] if result else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current: the threads that map are not those that the engine set up."""
        self.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")


class CudaBackend:
    """Memory of one GPU.

    Args:
        device: index, as the process sees it.
        granularity: bytes, a multiple of the driver's minimum (usually 2 MiB) and by default that. Each such piece is
            an allocation of its own, so that any of them can be given back.
        driver: stands in for cuda.bindings.driver in tests.

    Raises:
        ImportError: the package cuda-bindings is not installed.
        MemoryMapError: no driver, or no such device.
        ValueError: the granularity is not a multiple of the minimum.
    """

    def __init__(self, device: int = 0, *, granularity: int | None = None, driver: Any = None) -> None:
        self._cuda = _Cuda(driver or _driver(), device)
        flag = self._cuda.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        minimum = int(self._cuda.call("cuMemGetAllocationGranularity", self._cuda.properties, flag))
        self._granularity = minimum if granularity is None else granularity
        if self._granularity <= 0 or self._granularity % minimum:
            raise ValueError(f"granularity {granularity} is not a positive multiple of the device's, {minimum} bytes")

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, nbytes: int) -> CudaRegion:
        check_size(nbytes, self._granularity)
        return CudaRegion(self._cuda, nbytes, self._granularity)


class CudaRegion(Region):
    """A range of device addresses. An access to unmapped ones is an error of the kernel that makes it."""

    def __init__(self, cuda: _Cuda, nbytes: int, granularity: int) -> None:
        super().__init__(int(cuda.call("cuMemAddressReserve", nbytes, granularity, 0, 0)), nbytes, granularity)
        self._cuda = cuda
        self._handles: dict[int, Any] = {}
        self._tensor_lock = threading.Lock()

    def tensor(self) -> torch.Tensor:
        import torch

        # torch asks the driver which device an address is on, and only mapped ones have an answer.
        with self._tensor_lock:
            borrowed = not self._mapped.contains(0, self.granularity)
            if borrowed:
                self.map(0, self.granularity)
            try:
                return torch.as_tensor(_DeviceArray(self), device=f"cuda:{self._cuda.index}")
            finally:
                if borrowed:
                    self.unmap(0, self.granularity)

    def _commit(self, spans: Sequence[tuple[int, int]]) -> None:
        done: list[int] = []
        try:
            with self._cuda.current():
                for start, end in spans:
                    for offset in range(start, end, self.granularity):
                        self._map_piece(offset)
                        done.append(offset)
                    self._cuda.call("cuMemSetAccess", self.address + start, end - start, [self._cuda.access], 1)
                for start, end in spans:
                    self._cuda.call("cuMemsetD8Async", self.address + start, 0, end - start, self._cuda.stream)
                self._cuda.call("cuStreamSynchronize", self._cuda.stream)
        except MemoryMapError:
            self._cuda.api.cuStreamSynchronize(self._cuda.stream)  # no zeroing may be on its way to what is unmapped
            for offset in done:
                self._unmap_piece(offset)
            raise

    def _map_piece(self, offset: int) -> None:
        handle = self._cuda.call("cuMemCreate", self.granularity, self._cuda.properties, 0)
        try:
            self._cuda.call("cuMemMap", self.address + offset, self.granularity, 0, handle, 0)
        except MemoryMapError:
            self._cuda.call("cuMemRelease", handle)
            raise
        self._handles[offset] = handle

    def _unmap_piece(self, offset: int) -> None:
        self._cuda.call("cuMemUnmap", self.address + offset, self.granularity)
        self._cuda.call("cuMemRelease", self._handles.pop(offset))

    def _release(self, spans: Sequence[tuple[int, int]]) -> None:
        # Neither call can run out of anything. Should one fail, the context is broken, and so is the engine.
        for start, end in spans:
            for offset in range(start, end, self.granularity):
                self._unmap_piece(offset)

    def _dispose(self) -> None:
        for offset in list(self._handles):
            self._unmap_piece(offset)
        self._cuda.call("cuMemAddressFree", self.address, self.nbytes)


class _DeviceArray:
    """A region as the CUDA Array Interface, version 3, describes it. Keeps the region alive."""

    def __init__(self, region: CudaRegion) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|i1",
            "data": (region.address, False),
            "strides": None,
            "version": 3,
        }
