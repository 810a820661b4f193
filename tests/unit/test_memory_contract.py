"""What every memory backend must do, whatever is behind it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlaunch.kv.memory.base import MemoryBackend, RangeSet, Region
from kvlaunch.kv.memory.host import HostBackend
from kvlaunch.kv.memory.noop import NoopBackend

pytestmark = pytest.mark.contract

PAGES = 16


def cuda_backend() -> MemoryBackend:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda.bindings is not installed")
    from kvlaunch.kv.memory.cuda import CudaBackend, devices

    if devices() == 0:
        pytest.skip("no CUDA device")
    return CudaBackend(0)


BACKENDS: dict[str, Callable[[], MemoryBackend]] = {
    "host-guard": HostBackend,
    "host-open": lambda: HostBackend(guard=False),
    "host-coarse": lambda: HostBackend(granularity=64 * 1024),
    "noop": NoopBackend,
    "cuda": cuda_backend,
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> MemoryBackend:
    return BACKENDS[request.param]()


@pytest.fixture
def region(backend: MemoryBackend) -> Iterator[Region]:
    region = backend.reserve(PAGES * backend.granularity)
    yield region
    region.close()


def test_a_new_region_has_addresses_and_no_memory(backend: MemoryBackend, region: Region) -> None:
    assert region.nbytes == PAGES * backend.granularity
    assert region.granularity == backend.granularity
    assert region.mapped_bytes == 0


@pytest.mark.parametrize("nbytes", [0, -1, 1, 4097])
def test_a_region_is_a_whole_number_of_granules(backend: MemoryBackend, nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(backend.granularity)):
        backend.reserve(nbytes)


def test_map_and_unmap_are_counted_exactly(region: Region) -> None:
    g = region.granularity
    region.map(0, 2 * g)
    region.map_many([(5 * g, g), (3 * g, g)])
    assert region.mapped_bytes == 4 * g
    region.unmap(g, g)
    assert region.mapped_bytes == 3 * g
    region.unmap_many([(5 * g, g), (0, g), (3 * g, g)])
    assert region.mapped_bytes == 0


def test_neighbours_that_were_mapped_apart_are_unmapped_together_and_in_parts(region: Region) -> None:
    g = region.granularity
    for page in (2, 4, 3):
        region.map(page * g, g)
    region.unmap(2 * g, 3 * g)
    region.map(2 * g, 3 * g)
    region.unmap(3 * g, g)
    assert region.mapped_bytes == 2 * g
    region.map(3 * g, g)
    assert region.mapped_bytes == 3 * g


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0.5, 1), (0, 0.5), (0, 0), (-1, 1), (PAGES, 1), (PAGES - 1, 2), (0, PAGES + 1), (1, -1)]
)
def test_misuse_is_refused_and_changes_nothing(region: Region, offset: float, nbytes: float) -> None:
    g = region.granularity
    for act in (region.map, region.unmap):
        with pytest.raises(ValueError):
            act(int(offset * g), int(nbytes * g))
    assert region.mapped_bytes == 0


def test_mapping_what_is_mapped_is_refused_as_a_whole(region: Region) -> None:
    g = region.granularity
    region.map(4 * g, g)
    for ranges in ([(4 * g, g)], [(3 * g, 2 * g)], [(4 * g, 2 * g)], [(0, g), (2 * g, 6 * g)]):
        with pytest.raises(ValueError, match="already mapped"):
            region.map_many(ranges)
    assert region.mapped_bytes == g
    region.map(0, g)  # the first half of the refused request had not been mapped


def test_unmapping_what_is_not_mapped_is_refused_as_a_whole(region: Region) -> None:
    g = region.granularity
    region.map(4 * g, 2 * g)
    for ranges in ([(0, g)], [(3 * g, 2 * g)], [(5 * g, 2 * g)], [(4 * g, g), (6 * g, g)]):
        with pytest.raises(ValueError, match="not mapped"):
            region.unmap_many(ranges)
    assert region.mapped_bytes == 2 * g


def test_a_byte_given_twice_is_refused(region: Region) -> None:
    g = region.granularity
    with pytest.raises(ValueError, match="twice"):
        region.map_many([(0, 2 * g), (g, g)])
    region.map(0, 2 * g)
    with pytest.raises(ValueError, match="twice"):
        region.unmap_many([(0, g), (0, g)])
    assert region.mapped_bytes == 2 * g


def test_the_tensor_spans_the_region_and_touches_nothing(region: Region) -> None:
    pytest.importorskip("torch")
    tensor = region.tensor()
    assert tensor.dtype.itemsize == 1
    assert tuple(tensor.shape) == (region.nbytes,)
    assert region.mapped_bytes == 0
    if tensor.device.type != "meta":
        assert tensor.data_ptr() == region.address


def test_memory_is_zero_when_mapped_and_when_mapped_again(region: Region) -> None:
    pytest.importorskip("torch")
    tensor = region.tensor()
    if tensor.device.type == "meta":
        pytest.skip("this backend has no memory")
    g = region.granularity
    region.map(g, 2 * g)
    part = tensor[g : 3 * g]
    assert int(part.count_nonzero()) == 0
    part.fill_(7)
    assert int(part.count_nonzero()) == 2 * g
    region.unmap(2 * g, g)
    region.map(2 * g, g)
    assert int(tensor[g : 2 * g].count_nonzero()) == g, "the neighbour keeps what it held"
    assert int(tensor[2 * g : 3 * g].count_nonzero()) == 0


def test_a_closed_region_is_refused(backend: MemoryBackend) -> None:
    region = backend.reserve(backend.granularity)
    region.map(0, region.granularity)
    region.close()
    region.close()
    assert region.mapped_bytes == 0
    with pytest.raises(ValueError, match="closed"):
        region.map(0, region.granularity)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_range_set_agrees_with_a_set_of_numbers(steps: list[tuple[int, int, bool]]) -> None:
    ranges, model = RangeSet(), set[int]()
    for start, length, add in steps:
        span = set(range(start, start + length))
        assert ranges.overlaps(start, start + length) == bool(span & model)
        assert ranges.contains(start, start + length) == (span <= model)
        if add and not span & model:
            ranges.add(start, start + length)
            model |= span
        elif not add and span <= model:
            ranges.remove(start, start + length)
            model -= span
        assert ranges.total == len(model)
        assert {n for s, e in ranges.ranges() for n in range(s, e)} == model
        ends = [e for _, e in ranges.ranges()]
        assert all(s > e for (s, _), e in zip(ranges.ranges()[1:], ends, strict=False)), "neighbours are joined"
