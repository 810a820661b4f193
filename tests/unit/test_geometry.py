"""From blocks to pages to bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlaunch.errors import CompatibilityError
from kvlaunch.kv.geometry import BlockGeometry, merged_runs, smallest_page

G = 4096


def layers(n: int, stride: int, num_blocks: int) -> list[tuple[int, int]]:
    return [(i * num_blocks * stride, stride) for i in range(n)]


def test_layer_outermost_has_a_range_a_layer() -> None:
    geometry = BlockGeometry.from_strips(layers(3, 2048, 64), num_blocks=64, blocks_per_page=2, granularity=G)
    assert (geometry.num_pages, geometry.bytes_per_page, geometry.region_bytes) == (32, 3 * G, 3 * 64 * 2048)
    assert geometry.ranges([(1, 2)]) == [(G, 2 * G), (33 * G, 2 * G), (65 * G, 2 * G)]
    assert [geometry.page_of(b) for b in (0, 1, 2, 63)] == [0, 0, 1, 31]
    assert list(geometry.blocks_of(31)) == [62, 63]


def test_block_outermost_has_one_range() -> None:
    geometry = BlockGeometry.from_strips([(0, 3 * 2048)], num_blocks=64, blocks_per_page=2, granularity=G)
    assert geometry.ranges([(4, 1), (1, 2), (3, 1)]) == [(3 * G, 12 * G)]


def test_the_end_of_one_layer_and_the_start_of_the_next_are_one_range() -> None:
    geometry = BlockGeometry.from_strips(layers(2, G, 4), num_blocks=4, blocks_per_page=1, granularity=G)
    assert geometry.ranges([(0, 1), (3, 1)]) == [(0, G), (3 * G, 2 * G), (7 * G, G)]
    assert geometry.ranges([(0, 4)]) == [(0, 8 * G)]


def test_layers_that_share_memory_count_once() -> None:
    geometry = BlockGeometry.from_strips(
        [*layers(2, G, 4), *layers(2, G, 4)], num_blocks=4, blocks_per_page=1, granularity=G
    )
    assert len(geometry.strips) == 2
    assert geometry.bytes_per_page == 2 * G


@pytest.mark.parametrize(
    ("strips", "num_blocks", "blocks_per_page", "says"),
    [
        ([(100, G)], 8, 1, "byte 100 does not start"),
        ([(0, 1000)], 8, 1, "1 blocks of 1000 bytes.*\n.*multiple of 512 blocks"),
        ([(0, G)], 7, 2, "num_blocks=7.*blocks_per_page=2"),
        ([(0, G), (4 * G, G)], 8, 1, "byte 16384 overlaps .* ends at byte 32768"),
        ([(0, G), (0, 2 * G)], 8, 1, "overlaps"),
        ([(0, 2 * G), (G, 2 * G)], 8, 1, "overlaps"),
    ],
)
def test_what_does_not_fit_is_named(
    strips: list[tuple[int, int]], num_blocks: int, blocks_per_page: int, says: str
) -> None:
    with pytest.raises(CompatibilityError, match=says):
        BlockGeometry.from_strips(strips, num_blocks=num_blocks, blocks_per_page=blocks_per_page, granularity=G)


@pytest.mark.parametrize(
    ("strips", "num_blocks", "blocks_per_page"),
    [([], 8, 1), ([(0, 0)], 8, 1), ([(-G, G)], 8, 1), ([(0, G)], 0, 1), ([(0, G)], 8, 0), ([(0, -G)], 8, 1)],
)
def test_nonsense_is_a_value_error(strips: list[tuple[int, int]], num_blocks: int, blocks_per_page: int) -> None:
    with pytest.raises(ValueError):
        BlockGeometry.from_strips(strips, num_blocks=num_blocks, blocks_per_page=blocks_per_page, granularity=G)


@pytest.mark.parametrize("pages", [[(4, 1)], [(0, 5)], [(-1, 1)], [(0, 0)], [(0, -1)], [(0, 2), (1, 1)]])
def test_pages_that_do_not_exist_or_come_twice_are_refused(pages: list[tuple[int, int]]) -> None:
    geometry = BlockGeometry.from_strips(layers(2, G, 4), num_blocks=4, blocks_per_page=1, granularity=G)
    with pytest.raises(ValueError):
        geometry.ranges(pages)


@pytest.mark.parametrize("number", [-1, 4])
def test_blocks_and_pages_outside_are_refused(number: int) -> None:
    geometry = BlockGeometry.from_strips(layers(2, G, 4), num_blocks=4, blocks_per_page=1, granularity=G)
    with pytest.raises(ValueError):
        geometry.page_of(number)
    with pytest.raises(ValueError):
        geometry.blocks_of(number)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=4), st.sampled_from([1, 512, 4096, 65536]))
def test_smallest_page_fits_and_no_smaller_one_does(strides: list[int], granularity: int) -> None:
    n = smallest_page(strides, granularity)
    assert all(n * stride % granularity == 0 for stride in strides)
    divisors = (n // p for p in (2, 3, 5, 7) if n % p == 0)
    assert all(any(d * stride % granularity for stride in strides) for d in divisors)


@st.composite
def geometries(draw: st.DrawFn) -> BlockGeometry:
    granularity = draw(st.sampled_from([1, 8, 16]))
    strides = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    per_page = smallest_page(strides, granularity) * draw(st.integers(1, 2))
    num_blocks = per_page * draw(st.integers(1, 6))
    assume(num_blocks <= 400)
    strips, base = [], granularity * draw(st.integers(0, 2))
    for stride in strides:
        strips.append((base, stride))
        base += num_blocks * stride + granularity * draw(st.integers(0, 2))
        base += -base % granularity
    order = draw(st.permutations(strips))
    return BlockGeometry.from_strips(order, num_blocks=num_blocks, blocks_per_page=per_page, granularity=granularity)


@given(geometries())
def test_pages_are_disjoint_and_cover_exactly_every_block_of_every_strip(geometry: BlockGeometry) -> None:
    owner: dict[int, int] = {}
    for page in range(geometry.num_pages):
        ranges = geometry.ranges([(page, 1)])
        assert sum(n for _, n in ranges) == geometry.bytes_per_page
        for offset, nbytes in ranges:
            assert offset % geometry.granularity == nbytes % geometry.granularity == 0
            for byte in range(offset, offset + nbytes):
                assert owner.setdefault(byte, page) == page
    for base, stride in geometry.strips:
        for block in range(geometry.num_blocks):
            start = base + block * stride
            assert {owner.pop(byte) for byte in range(start, start + stride)} == {geometry.page_of(block)}
    assert not owner


@given(geometries(), st.data())
def test_ranges_of_many_pages_are_those_of_each(geometry: BlockGeometry, data: st.DataObject) -> None:
    pages = data.draw(st.sets(st.integers(0, geometry.num_pages - 1)))
    ranges = geometry.ranges([(page, 1) for page in data.draw(st.permutations(sorted(pages)))])
    together = {byte for offset, n in ranges for byte in range(offset, offset + n)}
    apart = {b for page in pages for offset, n in geometry.ranges([(page, 1)]) for b in range(offset, offset + n)}
    assert together == apart
    assert all(a + n < b for (a, n), (b, _) in pairwise(ranges)), "neighbours are joined"


@given(st.sets(st.integers(0, 60)))
def test_merged_runs_keeps_the_pages(pages: set[int]) -> None:
    runs = merged_runs([(page, 1) for page in pages])
    assert [p for first, n in runs for p in range(first, first + n)] == sorted(pages)
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))
