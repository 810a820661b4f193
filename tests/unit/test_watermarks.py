"""The reserve of mapped pages follows what bursts have needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvlaunch.kv.watermarks import Watermarks
from tests.unit.manager_fakes import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(num_blocks=400, blocks_per_page=1, ahead_low=1, ahead_high=4)
    yield made
    made.close()


def test_a_step_that_waited_doubles_the_reserve_and_idleness_halves_it() -> None:
    marks = Watermarks(4, 16, most=50)
    seen = []
    for _ in range(3):
        marks.outrun()
        seen.append((marks.low, marks.high))
    assert seen == [(16, 32), (25, 50), (25, 50)]
    for _ in range(4):
        marks.ease()
    assert (marks.low, marks.high) == (4, 16)


def test_no_reserve_stays_none() -> None:
    marks = Watermarks(0, 0, most=50)
    marks.outrun()
    assert (marks.low, marks.high) == (0, 0)


def test_bursts_larger_than_the_configured_reserve_stop_waiting(bench: Bench) -> None:
    """Twelve pages a burst, four kept ahead: after some bursts no step waits any more."""
    manager = bench.manager
    stalled = []
    for _ in range(10):
        before = manager.stats().stalled_steps
        manager.step_scheduled()
        bench.get(12)
        manager.step_finished()
        bench.settle()
        stalled.append(manager.stats().stalled_steps - before)
    assert stalled[0] == 1
    assert stalled[4:] == [0] * 6


def test_idle_gives_a_grown_reserve_back(bench: Bench) -> None:
    for _ in range(4):
        bench.manager.step_scheduled()
        blocks = bench.get(12)
        bench.manager.give(blocks)
        bench.manager.step_finished()
        bench.settle()
    bench.idle()
    assert bench.manager.stats().mapped_pages <= 2
