"""An operation over four real processes: on all of them or on none, whatever fails or falls silent."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.memory.smaps import resident_bytes
from tests.integration.kv_ranks import GEOMETRY, PAGE_BYTES, PAGES, Cluster, Wire, cluster

NULL = [[0, 1]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kvl", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def shared_four() -> Iterator[Cluster]:
    path = Path(tempfile.mkdtemp(prefix="kvl", dir="/tmp"))
    with cluster(path) as ranks:
        yield ranks
    shutil.rmtree(path)


@pytest.fixture
def four(shared_four: Cluster) -> Iterator[Cluster]:
    """Two stages of two ranks, nothing mapped but the null block's page."""
    yield shared_four
    shared_four.reset()


def committed(ranks: Cluster) -> list[int]:
    """Resident bytes of each rank's region, as the kernel counts."""
    return [
        resident_bytes(rank.pid, address, GEOMETRY.region_bytes)
        for rank, address in zip(ranks.ranks, ranks.addresses, strict=True)
    ]


@pytest.mark.parametrize("by_zmq", [False, True], ids=["local", "zmq"])
def test_memory_follows_on_every_rank(four: Cluster, by_zmq: bool) -> None:
    channel = four.channel(by_zmq=by_zmq)
    assert committed(four) == [PAGE_BYTES] * 4
    channel.map([(3, 2), (9, 1)])
    assert committed(four) == [4 * PAGE_BYTES] * 4
    assert four.pages() == [[[0, 1], [3, 2], [9, 1]]] * 4
    channel.unmap([(4, 1), (9, 1)])
    assert committed(four) == [2 * PAGE_BYTES] * 4
    states = channel.state()
    assert [s.global_rank for s in states] == [0, 1, 2, 3]
    assert [(s.pp_rank, s.tp_rank) for s in states] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [s.pid for s in states] == [rank.pid for rank in four.ranks]
    assert {(s.mapped_pages, s.mapped_bytes, s.reserved_bytes) for s in states} == {
        (2, 2 * PAGE_BYTES, GEOMETRY.region_bytes)
    }
    assert [(p.global_rank, p.pid) for p in channel.ping()] == [(r, four.ranks[r].pid) for r in (0, 2)]


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
@pytest.mark.parametrize("verb", ["map", "unmap"])
def test_one_failing_rank_leaves_all_as_they_were(four: Cluster, failing: int, verb: str) -> None:
    channel = four.channel()
    channel.map([(1, 2)])
    before = four.pages()
    pages = [(7, 3)] if verb == "map" else [(2, 1)]
    four.ranks[failing].ask("fail", "no memory left, as the test wants it")
    with pytest.raises(KVCommitError) as caught:
        getattr(channel, verb)(pages)
    assert caught.value.failures == {failing: "no memory left, as the test wants it"}
    assert caught.value.settled
    assert f"rank {failing}: no memory left" in str(caught.value)
    assert ("pages 7-9" if verb == "map" else "page 2") in str(caught.value)
    assert four.pages() == before
    assert committed(four) == [3 * PAGE_BYTES] * 4
    getattr(channel, verb)(pages)
    assert len({str(pages) for pages in four.pages()}) == 1
    assert four.pages() != before


def test_every_failing_rank_is_named(four: Cluster) -> None:
    channel = four.channel()
    for rank in (1, 2, 3):
        four.ranks[rank].ask("fail", f"reason {rank}")
    with pytest.raises(KVCommitError) as caught:
        channel.map([(5, 1)])
    assert caught.value.failures == {rank: f"reason {rank}" for rank in (1, 2, 3)}
    assert four.pages() == [NULL] * 4


@pytest.mark.parametrize("undoing", [0, 1, 2])
def test_a_rollback_that_fails_is_finished_before_the_next_operation(four: Cluster, undoing: int) -> None:
    channel = four.channel()
    channel.map([(5, 1)])
    full, gone = [[0, 1], [5, 1]], NULL
    four.ranks[3].ask("fail", "first")
    four.ranks[undoing].ask("fail", None, "no memory to map it again", "still none")
    with pytest.raises(KVCommitError) as caught:
        channel.unmap([(5, 1)])
    assert caught.value.failures == {3: "first"}
    assert not caught.value.settled
    assert four.pages() == [gone if rank == undoing else full for rank in range(4)]
    with pytest.raises(KVCommitError, match=r"earlier operation.*: still none") as caught:
        channel.map([(6, 1)])
    assert not caught.value.settled
    channel.map([(6, 1)])
    assert four.pages() == [[[0, 1], [5, 2]]] * 4


@pytest.mark.parametrize("lost", ["lose_replies", "lose_requests"])
def test_a_lost_message_is_repeated_and_the_operation_applied_once(four: Cluster, folder: Path, lost: str) -> None:
    wire = Wire(f"ipc://{folder}/w1", four.endpoint(1))
    try:
        channel = four.channel(endpoints={1: f"ipc://{folder}/w1"}, timeout_s=2.0)
        channel.ping()
        for rank in four.ranks:
            rank.ask("operations")
        setattr(wire, lost, 1)
        came = wire.requests
        channel.map([(5, 1)])
        assert wire.requests == came + 2
        assert [rank.ask("operations") for rank in four.ranks] == [["Map"]] * 4
        setattr(wire, lost, 1)
        channel.unmap([(5, 1)])
        assert [rank.ask("operations") for rank in four.ranks] == [["Unmap"]] * 4
        assert four.pages() == [NULL] * 4
        channel.close()
    finally:
        wire.close()


@pytest.mark.parametrize("verb", ["map", "unmap"])
@pytest.mark.parametrize("lost", ["lose_replies", "lose_requests"])
def test_a_stage_whose_messages_are_lost_is_put_right_before_the_next_operation(
    four: Cluster, folder: Path, lost: str, verb: str
) -> None:
    wire = Wire(f"ipc://{folder}/w1", four.endpoint(1))
    try:
        channel = four.channel(endpoints={1: f"ipc://{folder}/w1"}, timeout_s=1.0)
        channel.map([(5, 1)])
        before = four.pages()
        setattr(wire, lost, 3)  # the operation, its repeat, and what takes it back
        with pytest.raises(KVCommitError, match="listener of stage 1 did not answer within") as caught:
            getattr(channel, verb)([(9, 1)] if verb == "map" else [(5, 1)])
        assert list(caught.value.failures) == [2]
        assert not caught.value.settled
        assert four.pages()[:2] == before[:2]
        channel.map([(20, 2)])
        assert four.pages() == [[*before[0], [20, 2]]] * 4
        channel.close()
    finally:
        wire.close()


@pytest.mark.parametrize(
    ("stopped", "by_zmq"), [(2, False), (2, True), (3, False)], ids=["leader", "leader-zmq", "peer"]
)
@pytest.mark.parametrize("verb", ["map", "unmap"])
def test_a_process_that_hangs_is_an_error_in_time_and_put_right_when_it_wakes(
    four: Cluster, stopped: int, by_zmq: bool, verb: str
) -> None:
    channel = four.channel(timeout_s=2.2, by_zmq=by_zmq)
    channel.map([(5, 1)])
    before = four.pages()
    pages = [(9, 1)] if verb == "map" else [(5, 1)]
    four.ranks[stopped].signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(KVCommitError) as caught:
        getattr(channel, verb)(pages)
    assert time.monotonic() - started < 2.7
    assert list(caught.value.failures) == [stopped]
    assert not caught.value.settled
    says = "listener of stage 1 did not answer within" if stopped == 2 else "rank 3: no answer within"
    assert says in str(caught.value)
    with pytest.raises(KVCommitError, match="earlier operation") as caught:
        channel.map([(11, 1)])
    assert not caught.value.settled
    assert [four.ranks[r].pages() for r in (0, 1)] == before[:2]
    four.ranks[stopped].signal(signal.SIGCONT)
    channel.map([(20, 1)])
    assert four.pages() == [[*before[0], [20, 1]]] * 4
    getattr(channel, verb)(pages)
    assert len({str(pages) for pages in four.pages()}) == 1


def test_a_rank_that_died_is_named_at_once(folder: Path) -> None:
    ranks = Cluster(folder)
    try:
        channel = ranks.channel()
        channel.map([(5, 1)])
        ranks.ranks[3].signal(signal.SIGKILL)
        ranks.ranks[3].end()
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(KVCommitError, match=r"rank 3: .*closed the connection"):
                channel.map([(7, 1)])
        with pytest.raises(KVCommitError, match="rank 3"):
            channel.state()
        assert time.monotonic() - started < 1.0
        assert [ranks.ranks[r].pages() for r in range(3)] == [[[0, 1], [5, 1]]] * 3
    finally:
        assert ranks.close() == [0, 0, 0, -signal.SIGKILL]


@pytest.mark.parametrize("by_zmq", [False, True], ids=["local", "zmq"])
def test_a_leader_that_died_is_an_error_in_time(folder: Path, by_zmq: bool) -> None:
    ranks = Cluster(folder)
    try:
        channel = ranks.channel(timeout_s=0.6, by_zmq=by_zmq)
        channel.map([(5, 1)])
        ranks.ranks[2].signal(signal.SIGKILL)
        ranks.ranks[2].end()
        for _ in range(2):
            with pytest.raises(KVCommitError, match=r"rank 2: the listener of stage 1 did not answer") as caught:
                channel.map([(7, 1)])
            assert by_zmq or "onnection" in str(caught.value)
            assert not caught.value.settled
        assert [ranks.ranks[r].pages() for r in (0, 1)] == [[[0, 1], [5, 1]]] * 2
    finally:
        assert ranks.close() == [0, 0, -signal.SIGKILL, 0]
        for left in folder.iterdir():
            left.unlink()


@pytest.mark.parametrize(("option", "says"), [({"run": "other"}, "run other"), ({"epoch": 1}, "epoch 1")])
def test_another_run_or_epoch_is_refused(four: Cluster, option: dict[str, str | int], says: str) -> None:
    stranger = four.channel(**option, by_zmq="run" in option)
    for call in (lambda: stranger.map([(5, 1)]), stranger.state, stranger.ping):
        with pytest.raises(KVCommitError, match=f"refused.*{says}") as caught:
            call()
        assert sorted(caught.value.failures) == [0, 2]
    assert four.pages() == [NULL] * 4
    four.channel().map([(5, 1)])


def test_thousands_of_separate_pages_in_one_operation(folder: Path) -> None:
    with cluster(folder, pp_size=1) as ranks:
        channel = ranks.channel()
        odd = [(page, 1) for page in range(1, PAGES, 2)]
        channel.map(odd)
        assert committed(ranks) == [(1 + len(odd)) * PAGE_BYTES] * 2
        with pytest.raises(KVCommitError, match="page 8191 is not one of 256"):
            channel.map([(page, 1) for page in range(1001, 8192, 2)])
        huge = [(page, 1) for page in range(1000, 1000 + 2 * 60_000, 2)]  # more than a datagram holds
        with pytest.raises(KVCommitError) as caught:
            channel.map(huge)
        assert sorted(caught.value.failures) == [0, 1]
        with pytest.raises(ValueError, match="split it"):
            channel.map([(page, 1) for page in range(1000, 1000 + 2 * 400_000, 2)])
        channel.unmap(odd)
        assert ranks.pages() == [NULL] * 2


def test_a_stage_of_one_rank_needs_no_peers(folder: Path) -> None:
    with cluster(folder, tp_size=1, pp_size=3) as ranks:
        channel = ranks.channel()
        channel.map([(5, 1)])
        assert ranks.pages() == [[[0, 1], [5, 1]]] * 3


def test_a_closed_channel_says_so(four: Cluster) -> None:
    for by_zmq in (False, True):
        channel = four.channel(by_zmq=by_zmq)
        channel.ping()
        channel.close()
        channel.close()
        for call in (lambda c=channel: c.map([(5, 1)]), channel.state, channel.ping):
            with pytest.raises(KVCommitError, match="closed"):
                call()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_and_gets_lost_all_ranks_end_up_the_same(four: Cluster, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    wire = Wire(f"ipc://{folder}/w1", four.endpoint(1))
    channel = four.channel(endpoints={1: f"ipc://{folder}/w1"}, timeout_s=0.4)
    mapped: set[int] = {0}
    outcomes: set[str] = set()

    def operate() -> str:
        """A random map or unmap: done, failed (all as before), or unsettled (not known yet)."""
        verb = chance.choice(["map", "unmap"]) if len(mapped) > 1 else "map"
        candidates = sorted(set(range(1, 32)) - mapped if verb == "map" else mapped - {0})
        pages = set(chance.sample(candidates, min(len(candidates), chance.randint(1, 5))))
        try:
            getattr(channel, verb)([(page, 1) for page in pages])
        except KVCommitError as error:
            return "failed" if error.settled else "unsettled"
        mapped.symmetric_difference_update(pages)
        return "done"

    try:
        for _ in range(40):
            for rank in chance.sample(four.ranks, chance.choice([0, 0, 1, 1, 2, 4])):
                rank.ask("fail", *chance.choices([None, "no memory, as the test wants it"], k=chance.randint(1, 3)))
            if chance.random() < 0.15:
                setattr(wire, chance.choice(["lose_replies", "lose_requests"]), chance.randint(1, 4))
            outcome = operate()
            outcomes.add(outcome)
            if outcome == "unsettled" and chance.random() < 0.5:
                outcome = operate()
            if outcome == "unsettled":
                wire.lose_replies = wire.lose_requests = 0
                for rank in four.ranks:
                    rank.ask("heal")
                deadline = time.monotonic() + 20
                while operate() != "done":
                    assert time.monotonic() < deadline
            expected = sorted(mapped)
            for pages in four.pages():
                assert [page for first, n in pages for page in range(first, first + n)] == expected
        channel.close()
    finally:
        wire.close()
    assert outcomes == {"done", "failed", "unsettled"}


def test_two_requesters_do_not_disturb_each_other(four: Cluster) -> None:
    first, second = four.channel(), four.channel(by_zmq=True)
    for i in range(1, 20):
        first.map([(i, 1)])
        second.map([(100 + i, 1)])
    first.unmap([(1, 19)])
    assert four.pages() == [[[0, 1], [101, 19]]] * 4
