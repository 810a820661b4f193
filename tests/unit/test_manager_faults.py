"""KVCacheManager when the ranks fail, hang or crash, and how it wakes its owner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlaunch.kv.background import Background, Operation
from kvlaunch.kv.settings import KVSettings
from tests.unit.manager_fakes import DEADLINE_S, Bench, FakeRanks

pytestmark = pytest.mark.contract


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def factory(**changes: Any) -> Bench:
        benches.append(Bench(**changes))
        return benches[-1]

    yield factory
    for bench in benches:
        bench.close()


def maps_fail(kind: str, pages: set[int]) -> bool:
    return kind == "map"


def nothing_fails(kind: str, pages: set[int]) -> bool:
    return False


# Maps that fail


def test_a_failed_map_is_a_scheduling_miss_and_the_engine_goes_on(make, caplog):
    bench = make()
    bench.ranks.fail = maps_fail
    assert bench.manager.free_blocks == 159
    assert bench.manager.ensure(10) == 3
    assert bench.manager.last_error is not None
    assert bench.manager.last_error.failures == {3: "no memory"}
    assert bench.manager.free_blocks == 3
    assert bench.get(3) == [1, 2, 3]
    assert bench.manager.ensure(1) == 0
    assert len(bench.ranks.log) == 1  # not tried again within the pause
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "2 pages could not be mapped; next attempt in 0.05 s: rank 3 could not map" in caplog.text

    bench.ranks.fail = nothing_fails
    bench.clock.now += 0.05
    assert bench.manager.free_blocks == 156
    assert bench.manager.ensure(10) == 12
    assert bench.ranks.log == [("map", ((1, 2),)), ("map", ((1, 3),))]


def test_the_pause_doubles_up_to_a_second_and_starts_again_after_a_success(make):
    bench = make(backoff_s=0.3)
    bench.ranks.fail = maps_fail
    for pause in (0.3, 0.6, 1.0, 1.0):
        tried = len(bench.ranks.log)
        assert bench.manager.ensure(10) == 3
        bench.clock.now += pause - 0.01
        assert bench.manager.ensure(10) == 3
        assert len(bench.ranks.log) == tried + 1
        bench.clock.now += 0.02
    bench.ranks.fail = nothing_fails
    assert bench.manager.ensure(10) == 11
    bench.ranks.fail = maps_fail
    bench.manager.ensure(20)
    bench.clock.now += 0.31
    bench.ranks.fail = nothing_fails
    assert bench.manager.ensure(20) >= 20


@pytest.mark.parametrize("relief", ["limit", "unmap"])
def test_starvation_ends_early_when_there_is_more_room(make, relief):
    bench = make(limit_pages=20)
    blocks = bench.get(43)
    bench.ranks.fail = maps_fail
    assert bench.manager.ensure(10) == 0
    assert bench.manager.free_blocks == 0
    bench.ranks.fail = nothing_fails
    if relief == "limit":
        bench.manager.set_limit(21)
        assert bench.manager.free_blocks == 40
    else:
        bench.manager.set_limit(5)
        bench.manager.give(blocks)
        bench.step()
        bench.settle()
        assert bench.manager.stats().unmaps == 1
    assert bench.manager.ensure(10) >= 10


def test_a_failed_map_ahead_of_need_does_not_starve(make):
    bench = make(ahead_low=2, ahead_high=8)
    bench.ranks.fail = lambda kind, pages: kind == "map" and len(pages) > 3
    bench.get(3)
    bench.settle()
    assert bench.manager.stats().failed_maps == 1
    assert bench.manager.free_blocks == 156
    assert bench.get(4) == [4, 5, 6, 7]
    bench.step()
    bench.settle()
    assert bench.manager.stats().failed_maps == 1  # paused
    bench.clock.now += 0.06
    bench.ranks.fail = nothing_fails
    bench.step()
    bench.settle()
    assert bench.manager.stats().free_pages == 8


# Unmaps that fail


def test_pages_whose_unmap_failed_are_kept_out_and_tried_again(make, caplog):
    bench = make(limit_pages=9)
    bench.manager.give(bench.get(35))
    bench.ranks.fail = lambda kind, pages: kind == "unmap" and 6 in pages
    bench.idle()
    assert "8 pages could not be unmapped; next attempt in 0.05 s" in caplog.text
    bench.await_wake()
    assert bench.manager.stats().mapped_pages == 9
    assert (bench.manager.free_blocks, bench.manager.ensure(4)) == (3, 3)
    for pause in (0.05, 0.1, 0.2):
        bench.clock.now += pause
        bench.manager.tick()
        bench.settle()
    assert bench.ranks.mapped == {0, 6}  # halved until the one page was alone
    assert bench.manager.free_blocks == 31
    blocks = bench.get(31)
    assert not {24, 25, 26, 27} & set(blocks)
    bench.ranks.fail = nothing_fails
    bench.clock.now += 1
    bench.step()
    bench.settle()
    assert bench.manager.ensure(4) == 4


def test_a_failed_unmap_does_not_spin(make):
    bench = make()
    bench.manager.give(bench.get(35))
    bench.ranks.fail = lambda kind, pages: kind == "unmap"
    bench.idle()
    tried = len(bench.ranks.log)
    for _ in range(5):
        bench.manager.tick()
        bench.settle()
    assert len(bench.ranks.log) == tried
    assert bench.manager._background.deadline == pytest.approx(bench.clock.now + 0.05)


# Crashes and hangs


CALLS: dict[str, Callable[[Bench], object]] = {
    "ensure": lambda bench: bench.manager.ensure(1),
    "step_scheduled": lambda bench: bench.manager.step_scheduled(),
    "step_finished": lambda bench: bench.manager.step_finished(),
    "tick": lambda bench: bench.manager.tick(),
    "set_limit": lambda bench: bench.manager.set_limit(9),
    "stats": lambda bench: bench.manager.stats(),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_the_background_thread_surfaces_in_the_owner_again_and_again(make, call):
    bench = make(ahead_low=1, ahead_high=2)
    bench.manager.step_scheduled()
    bench.manager.step_scheduled()
    bench.ranks.crash = ZeroDivisionError("a bug")
    bench.get(1)  # maps ahead
    bench.await_wake()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            CALLS[call](bench)


def test_an_error_of_the_background_thread_ends_the_wait_for_it(make):
    bench = make()
    bench.ranks.crash = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        bench.manager.ensure(10)
    with pytest.raises(ZeroDivisionError):
        bench.manager.ensure(10)


def test_an_error_in_wake_surfaces_too(make):
    bench = make()
    bench.manager._background._wake = lambda: 1 / 0
    bench.manager.wake_at(bench.clock.now)
    bench.manager._background._thread.join(DEADLINE_S)
    with pytest.raises(ZeroDivisionError):
        bench.manager.tick()


def test_waiting_without_a_thread_is_an_error():
    settings = KVSettings(num_blocks=8, blocks_per_page=4, ahead_low=0, ahead_high=0)
    background = Background(FakeRanks(settings, 1), lambda: None, time.monotonic)
    with pytest.raises(RuntimeError, match="not running"):
        background.wait_result()


def test_close_waits_for_the_operation_in_flight_and_drops_the_rest(make):
    bench = make(ahead_low=1, ahead_high=2)
    bench.ranks.gate.clear()
    bench.get(1)
    assert bench.ranks.entered.acquire(timeout=DEADLINE_S)
    assert not bench.manager._background.stop(0.01)
    bench.ranks.gate.set()
    bench.manager.close()
    assert bench.ranks.closed
    assert bench.ranks.mapped == {0, 1, 2}


def test_a_channel_that_hangs_is_not_closed_under_the_thread(make, caplog):
    bench = make(ahead_low=1, ahead_high=2, commit_timeout_s=-0.49)  # close waits 0.02 s
    bench.ranks.gate.clear()
    bench.get(1)
    assert bench.ranks.entered.acquire(timeout=DEADLINE_S)
    bench.manager.close()
    assert not bench.ranks.closed
    assert "did not end" in caplog.text
    bench.ranks.gate.set()


def test_after_close_the_engine_can_still_free_and_finish(make):
    bench = make(ahead_low=2, ahead_high=4)
    bench.manager.step_scheduled()
    blocks = bench.get(10)
    bench.settle()
    bench.manager.close()
    log = list(bench.ranks.log)
    ready = bench.manager.ensure(1000)
    assert ready < 1000
    bench.manager.take(ready)
    bench.manager.give(blocks)
    bench.manager.step_finished()
    bench.manager.set_limit(1)
    bench.clock.now += 10
    bench.manager.tick()
    assert bench.ranks.log == log


# Waking the owner


def test_the_owner_is_woken_when_the_reserve_may_shrink_and_then_left_alone(make):
    bench = make(clock=time.monotonic, idle_s=0.02, ahead_low=1, ahead_high=2)
    bench.get(10)
    bench.step()
    while bench.manager._background.deadline is not None or not bench.manager._idle:
        bench.await_wake()
        bench.manager.tick()
    assert bench.manager.stats().free_pages == 0
    bench.settle()
    assert not bench.woken.acquire(timeout=0.1)


def test_a_manager_at_baseline_has_nothing_due(make):
    bench = make()
    assert bench.manager._background.deadline is None
    bench.get(1)
    assert bench.manager._background.deadline == bench.clock.now + 0.5
    bench.idle()
    assert bench.manager._background.deadline is None


def test_the_owner_is_woken_when_starvation_ends(make):
    bench = make(clock=time.monotonic, backoff_s=0.02)
    bench.ranks.fail = maps_fail
    assert bench.manager.ensure(10) == 3
    bench.await_wake()  # for the failure
    while bench.manager.free_blocks == 3:
        bench.await_wake()
        bench.manager.tick()
    assert bench.manager.free_blocks == 159


def test_the_owner_is_woken_at_a_time_of_its_own(make):
    bench = make(clock=time.monotonic)
    bench.manager.wake_at(time.monotonic() + 60)
    when = time.monotonic() + 0.03
    bench.manager.wake_at(when)
    bench.await_wake()
    assert time.monotonic() >= when
    bench.manager.tick()
    assert bench.manager._background.deadline is None


def test_a_time_taken_back_wakes_nobody_for_good(make):
    bench = make()
    bench.manager.wake_at(bench.clock.now + 60)
    bench.manager.wake_at(None)
    bench.manager.tick()
    assert bench.manager._background.deadline is None


def test_a_long_step_is_not_idleness(make):
    bench = make(ahead_low=1, ahead_high=2)
    bench.manager.step_scheduled()
    bench.get(10)
    bench.settle()
    bench.idle()
    assert bench.manager.stats().free_pages == 2
    assert bench.manager._background.deadline is None  # its end comes by itself
    bench.manager.step_finished()
    assert bench.manager._background.deadline == bench.clock.now + 0.5
    bench.idle()
    assert bench.manager.stats().free_pages == 0


def test_what_the_owner_waits_for_goes_first_and_maps_go_before_unmaps(make):
    bench = make()
    background = bench.manager._background
    bench.ranks.gate.clear()
    background.submit(Operation("map", (1,)))
    assert bench.ranks.entered.acquire(timeout=DEADLINE_S)
    background.submit(Operation("unmap", (1,)))
    background.submit(Operation("map", (3, 4)))
    background.submit(Operation("map", (2,), urgent=True))
    bench.ranks.gate.set()
    for _ in range(4):
        background.wait_result()
        background.results.popleft()
    assert bench.ranks.log == [("map", ((1, 1),)), ("map", ((2, 1),)), ("map", ((3, 2),)), ("unmap", ((1, 1),))]


def test_nothing_is_due_in_the_past(make):
    """A deadline that has passed and stays would have the background thread wake the owner without end."""
    bench = make()
    bench.ranks.fail = maps_fail
    bench.manager.ensure(10)
    bench.clock.now += 1
    bench.manager.tick()
    assert bench.manager._background.deadline is None

    bench.ranks.fail = nothing_fails
    bench.manager.give(bench.get(35))
    bench.ranks.fail = lambda kind, pages: kind == "unmap"
    bench.idle()
    bench.ranks.gate.clear()
    bench.clock.now += 1
    bench.manager.tick()  # tries again, which takes a while
    assert bench.manager._background.deadline is None
