"""One rank's memory: each operation once, as a whole or not at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.kv.ipc.local import LocalChannel
from kvlaunch.kv.ipc.messages import Map, RankState, Undo, Unmap
from kvlaunch.kv.memory.base import MemoryMapError
from kvlaunch.kv.memory.noop import NoopBackend, NoopRegion
from kvlaunch.kv.rank import RankMemory

G = 4096
PAGES = 16
GEOMETRY = BlockGeometry.from_strips(
    [(0, G), (2 * PAGES * G, G)], num_blocks=2 * PAGES, blocks_per_page=2, granularity=G
)
PAGE_BYTES = GEOMETRY.bytes_per_page


def make(**kwargs: Any) -> tuple[RankMemory, NoopRegion]:
    region = NoopBackend(record=True).reserve(GEOMETRY.region_bytes)
    rank = RankMemory(region, GEOMETRY, global_rank=3, pp_rank=1, tp_rank=1, run="r", epoch=2, **kwargs)
    return rank, region


def op(kind: type[Map | Unmap], seq: int, *pages: tuple[int, int], sender: str = "a", **kwargs: Any) -> Map | Unmap:
    return kind(**{"run": "r", "epoch": 2, **kwargs}, sender=sender, seq=seq, pages=pages)


def undo(seq: int, of: int, *, sender: str = "a") -> Undo:
    return Undo(run="r", epoch=2, sender=sender, seq=seq, of=of)


def test_only_the_null_blocks_page_is_mapped_at_first() -> None:
    rank, _ = make()
    state = rank.state()
    assert isinstance(state, RankState)
    assert (state.mapped_pages, state.mapped_bytes, state.reserved_bytes) == (1, PAGE_BYTES, GEOMETRY.region_bytes)
    assert (state.global_rank, state.pp_rank, state.tp_rank) == (3, 1, 1)
    assert rank.mapped_runs() == [(0, 1)]


def test_map_and_unmap() -> None:
    rank, region = make()
    assert rank.apply(op(Map, 1, (3, 2), (8, 1))).error is None
    assert rank.mapped_runs() == [(0, 1), (3, 2), (8, 1)]
    assert region.mapped_bytes == 4 * PAGE_BYTES
    assert rank.apply(op(Unmap, 2, (4, 1))).error is None
    assert rank.mapped_runs() == [(0, 1), (3, 1), (8, 1)]
    assert rank.state().mapped_bytes == 3 * PAGE_BYTES


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (op(Map, 2, (0, 1)), "page 0 holds the null block"),
        (op(Unmap, 2, (0, 1)), "page 0 holds the null block"),
        (op(Unmap, 2, (0, 4)), "page 0 holds the null block"),
        (op(Map, 2, (5, 1), (2, 2)), "page 3 is already mapped"),
        (op(Unmap, 2, (3, 2), (6, 1)), "page 6 is not mapped"),
        (op(Map, 2, (PAGES - 1, 2)), "page 16 is not one of 16"),
        (op(Map, 2, (7, 1), (6, 2)), "twice"),
        (op(Map, 2, (-1, 1)), "not a run"),
        (op(Map, 2, (6, 0)), "not a run"),
        (op(Map, 2, (1 << 62, 1 << 62)), "is not one of 16"),
        (op(Map, 2, (6, 1), run="other"), "run r epoch 2.*run other epoch 2"),
        (op(Map, 2, (6, 1), epoch=3), "epoch 2.*epoch 3"),
    ],
)
def test_a_refusal_names_the_reason_and_changes_nothing(request_: Map | Unmap, says: str) -> None:
    rank, region = make()
    rank.apply(op(Map, 1, (3, 2)))
    region.operations.clear()
    result = rank.apply(request_)
    assert result.global_rank == 3
    assert result.error is not None
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(result.error)
    assert rank.mapped_runs() == [(0, 1), (3, 2)]
    assert not region.operations


def test_a_repeated_operation_is_answered_and_not_applied_again() -> None:
    rank, region = make()
    region.operations.clear()
    assert rank.apply(op(Map, 1, (3, 1))).error is None
    assert rank.apply(op(Map, 1, (3, 1))).error is None
    assert len(region.operations) == 1
    failed = rank.apply(op(Map, 2, (3, 1)))
    rank.apply(op(Unmap, 1, (3, 1), sender="b"))
    assert rank.apply(op(Map, 2, (3, 1))) == failed, "a failure is remembered too"
    assert rank.mapped_runs() == [(0, 1)]


def test_an_operation_that_comes_late_is_refused() -> None:
    rank, _ = make()
    rank.apply(op(Map, 5, (3, 1)))
    assert "came after 5" in (rank.apply(op(Unmap, 4, (3, 1))).error or "")
    assert rank.mapped_runs() == [(0, 1), (3, 1)]


@pytest.mark.parametrize("kind", [Map, Unmap])
def test_undo_takes_back_what_was_applied_once(kind: type[Map | Unmap]) -> None:
    rank, region = make()
    rank.apply(op(Map, 1, (1, 2)))
    before = rank.mapped_runs()
    rank.apply(op(kind, 2, (3, 2) if kind is Map else (1, 2)))
    region.operations.clear()
    for seq in (3, 4):
        assert rank.apply(undo(seq, of=2)).error is None
        assert rank.mapped_runs() == before
    assert len(region.operations) == 1
    assert "taken back" in (rank.apply(op(kind, 2, (3, 2))).error or ""), "a late copy is not applied"
    assert rank.mapped_runs() == before
    assert rank.apply(op(Map, 5, (9, 1))).error is None


def test_undo_of_what_had_failed_does_nothing() -> None:
    rank, _ = make()
    rank.apply(op(Map, 1, (3, 1)))
    assert rank.apply(op(Map, 2, (3, 1))).error
    assert rank.apply(undo(3, of=2)).error is None
    assert rank.mapped_runs() == [(0, 1), (3, 1)]


def test_undo_before_the_operation_keeps_it_out() -> None:
    rank, _ = make()
    rank.apply(op(Map, 1, (3, 1)))
    assert rank.apply(undo(3, of=2)).error is None
    assert "before it came" in (rank.apply(op(Unmap, 2, (3, 1))).error or "")
    assert rank.mapped_runs() == [(0, 1), (3, 1)]
    assert rank.apply(op(Unmap, 4, (3, 1))).error is None


def test_undo_of_an_older_operation_is_refused() -> None:
    rank, _ = make()
    rank.apply(op(Map, 1, (3, 1)))
    rank.apply(op(Map, 2, (4, 1)))
    assert "cannot be taken back" in (rank.apply(undo(3, of=1)).error or "")


def test_undo_that_finds_no_memory_can_be_repeated() -> None:
    rank, region = make()
    rank.apply(op(Map, 1, (3, 1)))
    rank.apply(op(Unmap, 2, (3, 1)))
    region.fail_after = 0
    assert "no memory" in (rank.apply(undo(3, of=2)).error or "")
    region.fail_after = None
    assert rank.apply(undo(4, of=2)).error is None
    assert rank.mapped_runs() == [(0, 1), (3, 1)]


def test_a_shortage_is_the_operations_failure() -> None:
    rank, region = make()
    region.fail_on = frozenset({5 * 2 * G})
    assert "no memory" not in (rank.apply(op(Map, 1, (4, 1))).error or "")
    assert "byte 40960" in (rank.apply(op(Map, 2, (3, 1), (5, 1))).error or "")
    assert rank.mapped_runs() == [(0, 1), (4, 1)]


def test_a_fault_is_the_operations_failure() -> None:
    def fault(request: Map | Unmap) -> None:
        if request.seq == 1:
            raise MemoryMapError("injected")

    rank, region = make(fault=fault)
    region.operations.clear()
    assert rank.apply(op(Map, 1, (3, 1))).error == "injected"
    assert not region.operations
    assert rank.apply(op(Map, 2, (3, 1))).error is None


def test_a_layout_that_does_not_fit_the_region_is_refused() -> None:
    small = NoopBackend().reserve(GEOMETRY.region_bytes - G)
    coarse = NoopBackend(8192).reserve(GEOMETRY.region_bytes)
    for region, says in ((small, "takes 262144 bytes"), (coarse, "granularity")):
        with pytest.raises(ValueError, match=says):
            RankMemory(region, GEOMETRY, global_rank=0, pp_rank=0, tp_rank=0, run="r", epoch=0)
        assert region.mapped_bytes == 0


def test_two_memories_in_one_region_have_pages_of_their_own() -> None:
    """As where an engine has a pool for each kind of layers: each has its pages, the bytes are the region's."""
    other = BlockGeometry.from_strips(
        [(GEOMETRY.region_bytes, G)], num_blocks=2 * PAGES, blocks_per_page=2, granularity=G
    )
    region = NoopBackend().reserve(other.region_bytes)
    ids = {"global_rank": 3, "pp_rank": 1, "tp_rank": 1, "run": "r", "epoch": 2}
    first = RankMemory(region, GEOMETRY, **ids)
    second = RankMemory(region, other, **ids, beside=first)
    assert first.apply(op(Map, 1, (3, 2))).error is None
    assert second.apply(op(Map, 1, (4, 1))).error is None
    assert first.mapped_runs() == [(0, 1), (3, 2)]
    assert second.mapped_runs() == [(0, 1), (4, 1)]
    wanted = 3 * PAGE_BYTES + 2 * other.bytes_per_page
    for memory in (first, second):
        assert (memory.state().mapped_bytes, memory.state().reserved_bytes) == (wanted, region.nbytes)


def test_many_senders_do_not_pile_up() -> None:
    rank, _ = make()
    for i in range(1000):
        assert rank.apply(op(Map, 1, (3, 1), sender=f"m{i}")).error is None
        assert rank.apply(op(Unmap, 2, (3, 1), sender=f"m{i}")).error is None
    assert len(rank._records) < 100


def test_threads_cannot_map_the_same_page_twice() -> None:
    rank, region = make()
    start = threading.Barrier(8)
    results: list[int] = []

    def work(i: int) -> None:
        start.wait()
        for page in range(1, PAGES):
            results.append(rank.apply(op(Map, page, (page, 1), sender=f"t{i}")).error is None)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results) == PAGES - 1
    assert region.mapped_bytes == GEOMETRY.region_bytes


def test_local_channel() -> None:
    rank, region = make()
    channel = LocalChannel(rank)
    channel.map([(3, 1), (4, 1)])
    channel.map([])
    channel.unmap([(3, 1)])
    assert channel.state() == [rank.state()]
    assert rank.mapped_runs() == [(0, 1), (4, 1)]
    region.fail_after = 0
    with pytest.raises(KVCommitError, match=r"map 1 page.* rank 3.*no memory") as caught:
        channel.map([(7, 1)])
    assert list(caught.value.failures) == [3]
    assert caught.value.settled
    with pytest.raises(ValueError, match="twice"):
        channel.map([(7, 1), (7, 1)])
    channel.close()


class RankAgainstModel(RuleBasedStateMachine):
    """Random operations, repeats, undos and shortages: the rank is always what the confirmed history says."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.region = make()
        self.mapped = {0}
        self.seq = 0
        self.last: tuple[Map | Unmap, set[int], bool] | None = None
        """The last operation, the pages before it, whether it was applied."""

    @rule(first=st.integers(0, PAGES), count=st.integers(1, 4), mapping=st.booleans(), short=st.booleans())
    def operate(self, first: int, count: int, mapping: bool, short: bool) -> None:
        self.seq += 1
        request = op(Map if mapping else Unmap, self.seq, (first, count))
        pages = set(range(first, first + count))
        fits = 0 not in pages and max(pages) < PAGES
        fits = fits and not (pages & self.mapped if mapping else pages - self.mapped)
        self.region.fail_after = 0 if short else None
        result = self.rank.apply(request)
        self.region.fail_after = None
        assert (result.error is None) == (fits and not short)
        self.last = (request, set(self.mapped), result.error is None)
        if result.error is None:
            self.mapped = self.mapped | pages if mapping else self.mapped - pages

    @rule()
    def repeat(self) -> None:
        if self.last is not None:
            request, _, applied = self.last
            assert (self.rank.apply(request).error is None) == applied

    @rule()
    def take_back(self) -> None:
        if self.last is not None:
            request, before, _ = self.last
            self.seq += 1
            assert self.rank.apply(undo(self.seq, of=request.seq)).error is None
            self.mapped = before
            self.last = (request, before, False)

    @invariant()
    def agrees(self) -> None:
        assert {p for first, n in self.rank.mapped_runs() for p in range(first, first + n)} == self.mapped
        assert self.region.mapped_bytes == len(self.mapped) * PAGE_BYTES


TestRankAgainstModel = RankAgainstModel.TestCase
TestRankAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
