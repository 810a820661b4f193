"""PagePool against a simple model, and its promises one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlaunch.kv.pages import PagePool, PageState


def grown(pool: PagePool, pages: int) -> PagePool:
    pool.finish_map(pool.begin_map(pages))
    return pool


@pytest.mark.parametrize(("num_blocks", "blocks_per_page"), [(0, 1), (7, 2), (4, 0), (-4, 4)])
def test_a_geometry_with_parts_of_pages_is_refused(num_blocks, blocks_per_page):
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks}"):
        PagePool(num_blocks, blocks_per_page)


def test_page_0_is_mapped_and_serves_all_but_the_null_block():
    pool = PagePool(12, 4)
    assert (pool.mapped_pages, pool.free_blocks, pool.empty_pages) == (1, 3, 0)
    assert pool.take(3) == [1, 2, 3]


def test_with_one_block_a_page_page_0_has_nothing_to_hand_out():
    pool = PagePool(3, 1)
    assert pool.free_blocks == 0
    assert grown(pool, 1).take(1) == [1]


def test_blocks_come_from_the_fullest_page_then_from_the_lowest():
    pool = grown(PagePool(40, 4), 9)
    blocks = set(pool.take(pool.free_blocks))
    pool.give([4, 5, 6, 12, 13, 20, 21, 28, 29, 30, 31])  # free: page 1 three, 3 two, 5 two, 7 all
    assert [b // 4 for b in pool.take(8)] == [3, 3, 5, 5, 1, 1, 1, 7]
    assert len(blocks) == 39


def test_pages_are_mapped_from_the_lowest_up_and_retired_from_the_highest_down():
    pool = grown(PagePool(40, 4), 3)
    assert pool.retire(2, epoch=0) == 2
    assert [pool.state(page) for page in range(5)] == [2, 2, 3, 3, 0]
    pool.finish_unmap(pool.release(finished=0))
    assert pool.begin_map(3) == [2, 3, 4]


def test_page_0_and_pages_with_a_block_in_use_are_not_retired():
    pool = grown(PagePool(12, 4), 2)
    pool.take(4)  # page 0 and one block of page 1
    assert pool.retire(9, epoch=0) == 1
    assert pool.state(2) is PageState.RETIRING
    assert pool.free_blocks == 3


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (0, "null block"),
        (5, "block 5 of page 1 was freed, but it is free already"),
        (9, "block 9 was freed, but its page 2 is UNMAPPED"),
        (-1, "block -1 was freed, but blocks are 0 to 15"),
        (16, "block 16"),
    ],
)
def test_a_wrong_free_names_the_block_and_changes_nothing(block, reason):
    pool = grown(PagePool(16, 4), 1)
    pool.take(4)  # 1, 2, 3 and 4
    with pytest.raises(ValueError, match=reason):
        pool.give([1, 2, block])
    assert (pool.in_use_blocks, pool.free_blocks) == (4, 3)
    pool.give([1, 2, 3, 4])
    assert sorted(pool.take(7)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_block_given_twice_in_one_call_is_refused():
    pool = PagePool(4, 4)
    pool.take(2)
    with pytest.raises(ValueError, match="block 2 of page 0"):
        pool.give([2, 2])
    assert pool.in_use_blocks == 2


@pytest.mark.parametrize("n", [-1, 4])
def test_more_than_is_free_is_refused(n):
    pool = PagePool(8, 4)
    with pytest.raises(ValueError, match="3 are free"):
        pool.take(n)
    assert pool.take(3) == [1, 2, 3]


def test_pages_are_released_when_their_epoch_has_finished():
    pool = grown(PagePool(40, 4), 4)
    pool.retire(1, epoch=3)
    pool.retire(2, epoch=5)
    assert pool.release(2) == []
    assert pool.release(3) == [4]
    assert pool.release(4) == []
    assert pool.release(5) == [3, 2]
    assert pool.unmapping_pages == 3


def test_the_pages_retired_last_are_reclaimed_first():
    pool = grown(PagePool(40, 4), 4)
    pool.retire(2, epoch=1)
    pool.retire(2, epoch=2)
    assert pool.reclaim(3) == 3
    assert [pool.state(page) is PageState.MAPPED for page in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_reclaimed_page_waits_anew_when_it_retires_again():
    pool = grown(PagePool(8, 4), 1)
    pool.retire(1, epoch=1)
    assert pool.reclaim(5) == 1
    pool.give(pool.take(7))
    pool.retire(1, epoch=4)
    assert pool.release(3) == []
    assert pool.release(4) == [1]
    assert pool.reclaim(1) == 0


def test_a_page_moves_only_from_the_state_before():
    pool = PagePool(8, 4)
    with pytest.raises(ValueError, match="page 1 is UNMAPPED; only a page that is MAPPING can be MAPPED"):
        pool.finish_map([1])
    with pytest.raises(ValueError, match="page 0 is MAPPED"):
        pool.finish_unmap([0])


@pytest.mark.parametrize("blocks_per_page", [1, 4, 16])
def test_random_traffic_stays_compact(blocks_per_page):
    """500,000 tokens in sequences of up to 4,000, blocks of 16 tokens, at most 1,500 blocks live."""
    rng = random.Random(blocks_per_page)
    pool = PagePool(64_000, blocks_per_page)
    live: list[list[int]] = []
    touched: set[int] = set()
    tokens = peak = 0
    while tokens < 500_000:
        n = rng.randint(1, 250)
        while live and pool.in_use_blocks + n > 1500:
            pool.give(live.pop(rng.randrange(len(live))))
        if pool.free_blocks < n:
            pool.finish_map(pool.begin_map(-(-(n - pool.free_blocks) // blocks_per_page)))
        live.append(pool.take(n))
        touched.update(block // blocks_per_page for block in live[-1])
        peak = max(peak, pool.in_use_blocks)
        tokens += 16 * n
        pool.retire(pool.empty_pages - 4, epoch=0)
        pool.finish_unmap(pool.release(0))
    assert len(touched) <= 1.5 * -(-peak // blocks_per_page)


class PoolMachine(RuleBasedStateMachine):
    """The same calls on a PagePool and on a model that keeps sets and searches them."""

    PAGES, SIZE = 6, 3

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.PAGES * self.SIZE, self.SIZE)
        self.state = [PageState.MAPPED] + [PageState.UNMAPPED] * (self.PAGES - 1)
        self.used: set[int] = set()
        self.epochs: dict[int, int] = {}
        self.epoch = 0

    def pages(self, state: PageState) -> list[int]:
        return [page for page in range(self.PAGES) if self.state[page] is state]

    def free_in(self, page: int) -> set[int]:
        if self.state[page] is not PageState.MAPPED:
            return set()
        return set(range(max(1, page * self.SIZE), (page + 1) * self.SIZE)) - self.used

    def empty(self) -> list[int]:
        return [page for page in range(1, self.PAGES) if len(self.free_in(page)) == self.SIZE]

    @rule(n=st.integers(0, 8))
    def take(self, n: int) -> None:
        n = min(n, self.pool.free_blocks)
        blocks = self.pool.take(n)
        assert len(blocks) == n
        for block in blocks:
            levels = {page: len(self.free_in(page)) for page in range(self.PAGES) if self.free_in(page)}
            page = block // self.SIZE
            # A page that is being drained stays the fullest until it has nothing left.
            assert (levels[page], page) == min((level, page) for page, level in levels.items())
            assert block in self.free_in(page)
            self.used.add(block)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.pool.give(blocks)
        self.used -= set(blocks)

    @rule(block=st.integers(-2, 20))
    def give_wrongly(self, block: int) -> None:
        if block not in self.used:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.pool.give([*sorted(self.used), block])

    @rule(n=st.integers(0, 4))
    def begin_map(self, n: int) -> None:
        pages = self.pool.begin_map(n)
        assert pages == self.pages(PageState.UNMAPPED)[:n]
        for page in pages:
            self.state[page] = PageState.MAPPING

    @rule(data=st.data(), works=st.booleans())
    def end_map(self, data: st.DataObject, works: bool) -> None:
        mapping = self.pages(PageState.MAPPING)
        pages = mapping[: data.draw(st.integers(0, len(mapping)))]
        (self.pool.finish_map if works else self.pool.abort_map)(pages)
        for page in pages:
            self.state[page] = PageState.MAPPED if works else PageState.UNMAPPED

    @rule(n=st.integers(-1, 4), later=st.integers(0, 2))
    def retire(self, n: int, later: int) -> None:
        self.epoch += later
        pages = self.empty()[::-1][: max(n, 0)]
        assert self.pool.retire(n, self.epoch) == len(pages)
        for page in pages:
            self.state[page] = PageState.RETIRING
            self.epochs[page] = self.epoch

    @rule(n=st.integers(-1, 4))
    def reclaim(self, n: int) -> None:
        before = set(self.pages(PageState.RETIRING))
        assert self.pool.reclaim(n) == max(0, min(n, len(before)))
        back = {page for page in before if self.pool.state(page) is PageState.MAPPED}
        assert len(back) == max(0, min(n, len(before)))
        for page in back:
            self.state[page] = PageState.MAPPED
            del self.epochs[page]

    @rule(behind=st.integers(0, 3))
    def release(self, behind: int) -> None:
        finished = self.epoch - behind
        due = {page for page, epoch in self.epochs.items() if epoch <= finished}
        assert set(self.pool.release(finished)) == due
        for page in due:
            self.state[page] = PageState.UNMAPPING
            del self.epochs[page]

    @rule()
    def finish_unmap(self) -> None:
        pages = self.pages(PageState.UNMAPPING)
        self.pool.finish_unmap(pages)
        for page in pages:
            self.state[page] = PageState.UNMAPPED

    @invariant()
    def counts_agree(self) -> None:
        pool = self.pool
        assert [pool.state(page) for page in range(self.PAGES)] == self.state
        assert pool.free_blocks == sum(len(self.free_in(page)) for page in range(self.PAGES))
        assert pool.in_use_blocks == len(self.used)
        assert pool.empty_pages == len(self.empty())
        assert pool.mapped_pages == len(self.pages(PageState.MAPPED))
        assert pool.mapping_pages == len(self.pages(PageState.MAPPING))
        assert pool.retiring_pages == len(self.pages(PageState.RETIRING))
        assert pool.unmapping_pages == len(self.pages(PageState.UNMAPPING))
        assert pool.unmapped_pages == len(self.pages(PageState.UNMAPPED))
        assert pool.committed_pages == self.PAGES - len(self.pages(PageState.UNMAPPED))


TestPagePoolAgainstModel = PoolMachine.TestCase
TestPagePoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
