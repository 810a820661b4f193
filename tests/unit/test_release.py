"""No page is unmapped before every step that was scheduled before the free has finished."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlaunch.kv.release import StepClock
from tests.unit.manager_fakes import Bench

pytestmark = pytest.mark.contract


def test_steps_are_counted():
    clock = StepClock()
    assert (clock.step_scheduled(), clock.step_scheduled()) == (1, 2)
    clock.step_finished()
    assert (clock.scheduled, clock.finished) == (2, 1)


def test_a_step_that_was_never_scheduled_cannot_finish():
    clock = StepClock()
    clock.step_scheduled()
    clock.step_finished()
    with pytest.raises(ValueError, match="all 1 scheduled steps had finished"):
        clock.step_finished()


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_an_aborted_request_keeps_its_pages_until_the_steps_in_flight_are_done(in_flight):
    bench = Bench(limit_pages=11)
    try:
        blocks = bench.get(43)
        for _ in range(in_flight):
            bench.manager.step_scheduled()
        bench.manager.give(blocks)
        bench.manager.set_limit(1)
        bench.manager.step_scheduled()  # scheduled after the free: nothing waits for it
        for _ in range(in_flight):
            bench.settle()
            assert len(bench.ranks.mapped) == 11
            bench.manager.step_finished()
        bench.settle()
        assert bench.ranks.mapped == {0}
    finally:
        bench.close()


class Traffic(RuleBasedStateMachine):
    """Requests come, run in steps of which several are in flight, end or are aborted, while the limit moves."""

    BLOCKS_PER_PAGE = 2

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_blocks=48, blocks_per_page=self.BLOCKS_PER_PAGE, ahead_low=1, ahead_high=3, idle_s=0.5)
        self.manager = self.bench.manager
        self.requests: list[list[int]] = []
        self.in_flight: list[int] = []  # numbers of the unfinished steps
        self.last_free: dict[int, int] = {}  # page -> number of the latest step scheduled before its last free
        self.lock = threading.Lock()
        self.number = 0
        self.bench.ranks.on_unmap = self.check_unmap

    def check_unmap(self, pages: set[int]) -> None:
        with self.lock:
            for page in pages:
                assert page not in self.pages_in_use(), f"page {page} is unmapped with blocks in use"
                early = [step for step in self.in_flight if step <= self.last_free.get(page, 0)]
                assert not early, f"page {page} is unmapped while steps {early} may touch it"

    def pages_in_use(self) -> set[int]:
        return {block // self.BLOCKS_PER_PAGE for request in self.requests for block in request}

    def teardown(self) -> None:
        self.bench.close()

    @rule(n=st.integers(1, 12))
    def arrive(self, n: int) -> None:
        promised = self.manager.free_blocks
        ready = self.manager.ensure(n)
        assert ready >= min(n, promised)
        if ready >= n:
            blocks = self.manager.take(n)
            with self.lock:
                assert {block // self.BLOCKS_PER_PAGE for block in blocks} <= self.bench.ranks.mapped
                self.requests.append(blocks)

    @rule()
    def schedule(self) -> None:
        with self.lock:
            self.number += 1
            self.in_flight.append(self.number)
        self.manager.step_scheduled()

    @precondition(lambda self: self.in_flight)
    @rule()
    def finish(self) -> None:
        with self.lock:
            self.in_flight.pop(0)
        self.manager.step_finished()
        self.bench.settle()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        with self.lock:
            blocks = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
            for block in blocks:
                self.last_free[block // self.BLOCKS_PER_PAGE] = self.number
        self.manager.give(blocks)

    @rule(seconds=st.sampled_from([0.01, 0.3, 0.6]))
    def pass_time(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.manager.tick()
        self.bench.settle()

    @rule(pages=st.one_of(st.none(), st.integers(1, 24)))
    def limit(self, pages: int | None) -> None:
        self.manager.set_limit(pages)
        self.bench.settle()

    @invariant()
    def ranks_agree(self) -> None:
        self.bench.settle()
        stats = self.manager.stats()
        assert stats.mapped_pages == len(self.bench.ranks.mapped)
        assert stats.in_use_blocks == sum(map(len, self.requests))
        assert self.pages_in_use() <= self.bench.ranks.mapped


TestRandomTraffic = Traffic.TestCase
TestRandomTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
