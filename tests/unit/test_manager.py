"""KVCacheManager: growing, shrinking, the limit, and the reserve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.channel import Channel
from kvlaunch.kv.ipc.messages import RankState
from kvlaunch.kv.manager import KVCacheManager
from kvlaunch.kv.settings import KVSettings
from tests.unit.manager_fakes import Bench, FakeRanks

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


# Start


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (lambda ranks: ranks.state()[:3], "needs 4 ranks in one state; 3 reported"),
        (lambda ranks: [*ranks.state()[:3], ranks.rank_state(2)], "3 reported"),
        (lambda ranks: [*ranks.state()[:3], ranks.rank_state(3, num_blocks=80)], r"rank 3 has .* \(80, 4, 1\)"),
        (
            lambda ranks: [*ranks.state()[:3], ranks.rank_state(3, mapped_pages=0)],
            r"\(160, 4, 0\) and not \(160, 4, 1\)",
        ),
    ],
)
def test_start_refuses_ranks_that_are_missing_or_differ(states: Callable[[FakeRanks], list[RankState]], message: str):
    settings = KVSettings(num_blocks=160, blocks_per_page=4, ahead_low=0, ahead_high=0)

    class Ranks(FakeRanks):
        def state(self) -> list[RankState]:
            return states(FakeRanks(settings, 4))

    channel: Channel = Ranks(settings, 4)
    manager = KVCacheManager(world_size=4, settings=settings, channel=channel, wake=lambda: None)
    with pytest.raises(KVCommitError, match=message):
        manager.start()


def test_watermarks_in_the_wrong_order_are_refused():
    settings = KVSettings(num_blocks=160, blocks_per_page=4, ahead_low=5, ahead_high=4)
    with pytest.raises(ValueError, match="ahead_low=5 must lie between 0 and ahead_high=4"):
        KVCacheManager(world_size=1, settings=settings, channel=FakeRanks(settings, 1), wake=lambda: None)


# Growing


def test_blocks_of_page_0_need_no_map(make):
    bench = make()
    assert bench.get(3) == [1, 2, 3]
    assert bench.ranks.log == []
    assert bench.manager.stats().stalls == 0


def test_ensure_maps_what_is_missing_in_one_operation_and_counts_the_stall(make):
    bench = make()
    bench.manager.step_scheduled()
    assert bench.manager.ensure(12) == 3 + 12
    assert bench.manager.ensure(40) == 3 + 40
    assert bench.ranks.log == [("map", ((1, 3),)), ("map", ((4, 7),))]
    assert bench.manager.take(43)[:4] == [1, 2, 3, 4]
    stats = bench.manager.stats()
    assert (stats.stalls, stats.stalled_steps, stats.steps, stats.maps) == (2, 1, 1, 2)
    assert (stats.mapped_pages, stats.free_pages, stats.in_use_blocks) == (11, 0, 43)


def test_all_of_the_address_space_is_promised_and_can_be_taken(make):
    bench = make()
    assert bench.manager.free_blocks == 159
    assert len(bench.get(100)) == 100
    assert bench.manager.free_blocks == 59
    assert bench.manager.ensure(60) == 59
    assert sorted(bench.manager.take(59))[-1] == 159
    assert (bench.manager.free_blocks, bench.manager.ensure(1)) == (0, 0)


def test_taking_more_than_is_ready_is_an_error(make):
    bench = make()
    with pytest.raises(ValueError, match="asked for 4 blocks, but 3"):
        bench.manager.take(4)


def test_a_wrong_free_is_an_error(make):
    bench = make()
    with pytest.raises(ValueError, match="block 9 "):
        bench.manager.give([9])


def test_the_reserve_is_filled_off_the_hot_path_and_then_no_step_waits(make):
    bench = make(ahead_low=2, ahead_high=6)
    bench.manager.step_scheduled()
    bench.get(4)  # the engine was idle: this one waits
    bench.settle()
    assert bench.manager.stats().free_pages == 6
    for _ in range(20):
        bench.get(4)
        bench.settle()
        bench.step()
    stats = bench.manager.stats()
    assert (stats.stalls, stats.in_use_blocks) == (1, 84)
    assert 2 <= stats.free_pages <= 6
    assert stats.maps < 10  # in batches


def test_demand_waits_for_pages_under_way_and_asks_only_for_the_rest_ahead_of_the_queue(make):
    bench = make(ahead_low=1, ahead_high=4)
    bench.ranks.gate.clear()
    bench.get(3)  # asks for pages 1-4 ahead of need
    assert bench.ranks.entered.acquire(timeout=10)
    bench.ranks.gate.set()
    assert bench.manager.ensure(24) >= 24  # the reserve follows behind
    assert bench.ranks.log[:2] == [("map", ((1, 4),)), ("map", ((5, 2),))]


def test_a_reserve_larger_than_the_limit_stops_at_the_limit(make):
    bench = make(ahead_low=8, ahead_high=16, limit_pages=5)
    bench.get(4)
    bench.settle()
    bench.step()
    assert bench.ranks.mapped == {0, 1, 2, 3, 4}


# The limit


def test_the_limit_bounds_promise_and_growth(make):
    bench = make(limit_pages=3)
    assert bench.manager.free_blocks == 11
    assert bench.manager.ensure(12) == 11
    assert bench.ranks.mapped == {0, 1, 2}
    assert bench.manager.stats().failed_maps == 0


def test_a_limit_below_what_is_in_use_is_deferred_and_reached_as_memory_frees(make):
    bench = make(ahead_low=2, ahead_high=4)
    first, second = bench.get(19), bench.get(20)  # pages 0-4, then 5-9
    bench.settle()
    assert bench.manager.set_limit(5) == 5 + bench.manager.stats().retiring_pages
    bench.settle()
    assert bench.manager.pages_over_limit == 5
    assert (bench.manager.free_blocks, bench.manager.ensure(1)) == (0, 0)
    bench.manager.give(second[:8])
    bench.step()
    bench.settle()
    assert bench.manager.pages_over_limit == 3
    bench.manager.give(second[8:])
    bench.step()
    bench.settle()
    assert bench.manager.pages_over_limit == 0
    assert bench.ranks.mapped == {0, 1, 2, 3, 4}
    bench.manager.give(first[:1])
    assert bench.manager.ensure(1) == 1


def test_a_raised_limit_grows_at_once(make):
    bench = make(ahead_low=2, ahead_high=4, limit_pages=2)
    bench.get(7)
    assert bench.manager.free_blocks == 0
    assert bench.manager.set_limit(20) == 0
    assert bench.manager.free_blocks == 72
    bench.settle()
    assert bench.manager.stats().free_pages == 4
    assert bench.manager.ensure(20) >= 20
    bench.manager.set_limit(None)
    assert bench.manager.stats().limit_pages == 40


def test_a_limit_that_does_not_bind_sheds_and_stops_the_reserve_and_lets_the_owner_pass(make):
    bench = make(ahead_low=2, ahead_high=4, limit_pages=3, limit_binds=False)
    blocks = bench.get(19)  # pages 0-4
    bench.settle()
    assert bench.ranks.mapped == {0, 1, 2, 3, 4}
    assert (bench.manager.pages_over_limit, bench.manager.pages_held_over_limit) == (2, 2)
    bench.manager.give(blocks[8:])
    bench.step()
    bench.settle()
    assert bench.manager.pages_held_over_limit == 0
    assert bench.ranks.mapped == {0, 1, 2}


def test_a_limit_without_page_0_is_refused(make):
    bench = make()
    with pytest.raises(ValueError, match="limit of 0 pages"):
        bench.manager.set_limit(0)
    assert bench.manager.stats().limit_pages == 40


def test_under_the_limit_growth_waits_for_an_unmap_under_way(make):
    """Pages 1-3 must go before others may come: ensure waits for that."""
    bench = make(limit_pages=4)
    bench.manager.give(bench.get(15))
    assert bench.ranks.entered.acquire(timeout=10)  # the map
    bench.ranks.gate.clear()
    bench.idle_without_settling()
    assert bench.ranks.entered.acquire(timeout=10)  # the unmap, which now hangs
    assert bench.manager.free_blocks == 15
    bench.ranks.gate.set()
    assert bench.manager.ensure(15) == 15
    assert [kind for kind, _ in bench.ranks.log] == ["map", "unmap", "map"]


# Giving back


def test_idle_shrinks_to_page_0_where_it_has_a_free_block(make):
    bench = make(ahead_low=4, ahead_high=8)
    bench.manager.give(bench.get(50))
    bench.step()
    bench.settle()
    assert len(bench.ranks.mapped) > 8
    bench.idle()
    assert bench.ranks.mapped == {0}


def test_idle_keeps_one_page_where_page_0_has_no_free_block(make):
    bench = make(ahead_low=4, ahead_high=8, blocks_per_page=1)
    bench.manager.give(bench.get(50))
    bench.step()
    bench.settle()
    bench.idle()
    assert bench.ranks.mapped == {0, 1}
    stats = bench.manager.stats()
    assert bench.get(1) == [1]
    assert bench.manager.stats().stalls == stats.stalls


def test_idle_keeps_pages_with_blocks_in_use(make):
    bench = make(ahead_low=4, ahead_high=8)
    blocks = bench.get(30)
    bench.settle()
    bench.manager.give([block for block in blocks if block != 22])
    bench.idle()
    assert bench.ranks.mapped == {0, 5}


def test_before_idle_s_has_passed_nothing_goes(make):
    bench = make(ahead_low=4, ahead_high=8)
    bench.manager.give(bench.get(50))
    bench.clock.now += 0.4
    bench.step()
    bench.settle()
    mapped = set(bench.ranks.mapped)
    bench.clock.now += 0.4
    bench.manager.tick()
    bench.settle()
    assert bench.ranks.mapped == mapped


def test_blocks_freed_while_idle_go_at_the_next_tick(make):
    """An engine's prefix cache may let go of its blocks long after the last step."""
    bench = make()
    blocks = bench.get(50)
    bench.idle()
    assert len(bench.ranks.mapped) == 13
    bench.manager.give(blocks)
    bench.await_wake()
    bench.manager.tick()
    bench.settle()
    assert bench.ranks.mapped == {0}


def test_a_burst_of_unmaps_is_one_operation_of_merged_runs(make):
    bench = make()
    blocks = bench.get(63)
    bench.manager.give([block for block in blocks if block // 4 not in (3, 4)])
    bench.idle()
    assert bench.ranks.log[1:] == [("unmap", ((1, 2), (5, 11)))]


def test_steady_load_that_goes_up_and_down_neither_maps_nor_unmaps(make):
    bench = make(ahead_low=2, ahead_high=4)
    base = bench.get(10)
    for round_ in range(30):
        blocks = bench.get(80)
        bench.step()
        bench.clock.now += 0.2
        bench.manager.give(blocks)
        bench.step()
        bench.settle()
        if round_ == 5:
            before = len(bench.ranks.log)
    assert len(bench.ranks.log) == before
    bench.manager.give(base)


def test_a_busy_engine_gives_back_what_it_has_not_needed_for_a_while(make):
    bench = make(ahead_low=2, ahead_high=4)
    base, more = bench.get(10), bench.get(100)
    bench.manager.give(more)
    bench.settle()
    for _ in range(6):
        bench.step()
        bench.clock.now += 0.3
    bench.settle()
    stats = bench.manager.stats()
    assert stats.free_pages == 4
    assert stats.mapped_pages == 3 + 4
    assert stats.unmaps == 1
    bench.manager.give(base)


def test_ahead_of_need_pages_that_retire_are_taken_back_without_map_or_unmap(make):
    bench = make(ahead_low=2, ahead_high=4)
    bench.get(3)
    blocks = bench.get(100)
    bench.settle()
    log = list(bench.ranks.log)
    bench.manager.step_scheduled()
    bench.manager.give(blocks)
    bench.manager.set_limit(3)  # all must go, once the step has finished
    assert bench.manager.stats().retiring_pages > 20
    bench.manager.set_limit(None)
    assert bench.get(100)
    assert bench.ranks.log == log


def retire_pages_while_a_step_is_in_flight(bench: Bench, blocks: list[int]) -> None:
    """Free the blocks and stay busy until the pages beyond ahead_high retire; they wait for the step in flight."""
    bench.manager.step_scheduled()
    bench.manager.give(blocks)
    for _ in range(2):
        bench.manager.step_scheduled()
        bench.clock.now += bench.settings.idle_s
        bench.manager.step_finished()
    assert bench.manager.stats().retiring_pages >= len(blocks) // 4 - bench.settings.ahead_high


def test_the_reserve_is_filled_with_retiring_pages_first(make):
    bench = make(ahead_low=2, ahead_high=4)
    bench.get(3)
    blocks = bench.get(80)
    bench.settle()
    retire_pages_while_a_step_is_in_flight(bench, blocks)
    log = list(bench.ranks.log)
    for _ in range(16):
        bench.get(4)
    bench.settle()
    assert bench.manager.stats().free_pages >= 2
    assert bench.ranks.log == log


def test_retiring_pages_beyond_a_lower_limit_are_not_reclaimed(make):
    bench = make()
    blocks = bench.get(83)
    bench.manager.step_scheduled()
    bench.manager.give(blocks)
    bench.manager.set_limit(3)
    assert bench.manager.free_blocks == 11
    assert bench.manager.ensure(40) == 11


def test_retiring_pages_are_promised_while_starved(make):
    bench = make(backoff_s=1.0, idle_s=0.1)
    bench.get(3)
    blocks = bench.get(80)
    bench.ranks.fail = lambda kind, pages: kind == "map"
    assert bench.manager.ensure(1) == 0
    retire_pages_while_a_step_is_in_flight(bench, blocks)
    assert bench.manager.free_blocks == 80
    assert bench.manager.ensure(81) == 80
    assert bench.manager.stats().failed_maps == 1


def test_a_map_under_way_as_the_engine_goes_idle_is_shrunk_later(make):
    bench = make(ahead_low=1, ahead_high=4)
    bench.ranks.gate.clear()
    bench.manager.give(bench.get(2))
    bench.idle_without_settling()
    assert bench.manager._background.deadline == bench.clock.now + 0.5
    bench.ranks.gate.set()
    bench.settle()
    assert bench.manager.stats().free_pages == 4
    bench.idle()
    assert bench.ranks.mapped == {0}
