"""A rank on another host than its stage's leader: in step as the others are, and no longer than a deadline without."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import zmq

from kvlaunch.errors import ConfigError, KVCommitError
from kvlaunch.kv.ipc import network, wire
from kvlaunch.kv.ipc.far import FarLink
from kvlaunch.kv.ipc.links import LinkClosedError
from kvlaunch.kv.ipc.messages import Map, RankResult, State
from kvlaunch.kv.ipc.peer import FarPeer
from kvlaunch.kv.ipc.roles import rank_role
from kvlaunch.secret import new_secret
from tests.integration.network_kit import LOCAL, SECRET, FarStage
from tests.integration.stage_kit import HEAD, memory

NULL = (0, 1)


def test_it_keeps_in_step(folder: Path) -> None:
    with FarStage(folder) as stage:
        stage.channel.map([(3, 2), (9, 1)])
        stage.channel.unmap([(4, 1)])
        assert stage.mapped == [[NULL, (3, 1), (9, 1)]] * 2
        assert stage.channel.state() == [rank.state() for rank in stage.ranks]


def test_what_it_cannot_map_nobody_maps(folder: Path) -> None:
    with FarStage(folder) as stage:
        stage.channel.map([(3, 1)])
        stage.ranks[1].apply(Map(**{**HEAD, "sender": "other"}, seq=1, pages=((5, 1),)))
        with pytest.raises(KVCommitError, match="already mapped") as failed:
            stage.channel.map([(5, 2)])
        assert list(failed.value.failures) == [1]
        assert stage.mapped == [[NULL, (3, 1)], [NULL, (3, 1), (5, 1)]]


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_connection_that_breaks_costs_nothing(folder: Path, lost: str) -> None:
    with FarStage(folder) as stage:
        stage.channel.map([(3, 1)])
        broken = threading.Event()

        def lose(data: bytes) -> bytes:
            if broken.is_set():
                return data
            broken.set()
            return b""

        setattr(stage.cable, "bend" if lost == "request" else "bend_back", lose)
        stage.channel.map([(7, 2)])
        assert broken.is_set()
        assert stage.cable.connections >= 2
        assert stage.mapped == [[NULL, (3, 1), (7, 2)]] * 2


def test_one_that_does_not_answer_is_named_and_brought_back_in_step(folder: Path) -> None:
    with FarStage(folder) as stage:
        stage.channel.map([(3, 1)])
        with stage.ranks[1]._lock:  # its memory hangs
            began = time.monotonic()
            with pytest.raises(KVCommitError) as failed:
                stage.channel.map([(7, 2)])
            assert time.monotonic() - began < 3
            assert list(failed.value.failures) == [1]
            assert stage.cable.endpoint in failed.value.failures[1]
            assert "does its process hang" in failed.value.failures[1]
            assert stage.mapped_of_leader == [NULL, (3, 1)]
        stage.channel.map([(8, 1)])
        assert stage.mapped == [[NULL, (3, 1), (8, 1)]] * 2


def test_one_that_is_gone_is_named(folder: Path) -> None:
    with FarStage(folder) as stage:
        stage.channel.map([(3, 1)])
        stage.peer.close()
        with pytest.raises(KVCommitError) as failed:
            stage.channel.map([(7, 2)])
        assert list(failed.value.failures) == [1]
        assert stage.mapped_of_leader == [NULL, (3, 1)]


@pytest.mark.parametrize("stranger", [{"secret": new_secret()}, {"role": 2}, {"epoch": 1}], ids=str)
def test_a_stranger_in_its_place_is_not_believed(folder: Path, stranger: dict[str, object]) -> None:
    with FarStage(folder, **stranger) as stage:  # type: ignore[arg-type]
        with pytest.raises(KVCommitError) as failed:
            stage.channel.map([(7, 2)])
        assert list(failed.value.failures) == [1]
        assert stage.mapped == [[NULL]] * 2


def test_who_does_not_know_the_secret_changes_nothing() -> None:
    rank = memory(1)
    peer = FarPeer(rank, endpoint=LOCAL, secret=SECRET)
    peer.start()
    link = FarLink(1, peer.endpoint, secret=new_secret(), run="r")
    link.send(1, wire.encode(Map(**HEAD, seq=1, pages=((3, 1),))))
    with pytest.raises(TimeoutError, match="another secret"):
        link.receive(time.monotonic() + 0.5)
    link.close()
    assert rank.mapped_runs() == [NULL]
    peer.close()


@pytest.mark.parametrize("nonsense", [b"", b"1234567", b"12345678", b"12345678\xc1", b"\0" * 10_000], ids=len)
def test_nonsense_is_answered_and_does_no_harm(nonsense: bytes) -> None:
    rank = memory(1)
    peer = FarPeer(rank, endpoint=LOCAL, secret=SECRET)
    peer.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger, sock.rcvtimeo = 0, 5000
        network.connect(sock, peer.endpoint, secret=SECRET, run="r", role=rank_role(1))
        sock.send(nonsense)
        answer = sock.recv()
        assert answer.startswith(nonsense[:8])
        assert "not a request" in (wire.decode_result(answer[len(nonsense[:8]) :]).error or "")
        sock.send(b"12345678" + wire.encode(State(**HEAD, seq=1)))
        assert wire.decode_state(sock.recv()[8:]) == rank.state()
    assert rank.mapped_runs() == [NULL]
    peer.close()


def test_a_wait_ends_when_the_link_is_closed() -> None:
    peer = FarPeer(memory(1), endpoint=LOCAL, secret=SECRET)  # not started: nobody answers
    link = FarLink(1, "tcp://127.0.0.1:9", secret=SECRET, run="r")
    link.send(1, b"x")
    closer = threading.Timer(0.2, link.close)
    closer.start()
    with pytest.raises(LinkClosedError):
        link.receive(time.monotonic() + 20)
    closer.join()
    link.close()
    assert link.gone()
    with pytest.raises(LinkClosedError):
        link.send(2, b"x")
    peer.close()


def test_answers_carry_the_number_of_what_they_answer() -> None:
    peer = FarPeer(memory(1), endpoint=LOCAL, secret=SECRET)
    peer.start()
    link = FarLink(1, peer.endpoint, secret=SECRET, run="r")
    for number in (1, 2**64 - 1):
        link.send(number, wire.encode(Map(**HEAD, seq=1, pages=((3, 1),))))
        got, body = link.receive(time.monotonic() + 10)
        while got != number:  # a repetition was answered too
            got, body = link.receive(time.monotonic() + 10)
        assert wire.decode_result(body) == RankResult(global_rank=1)
    link.close()
    peer.close()


def test_without_a_secret_nothing_is_served_or_reached() -> None:
    with pytest.raises(ConfigError, match="secret"):
        FarPeer(memory(1), endpoint=LOCAL, secret=None)
    with pytest.raises(ConfigError, match="secret"):
        FarLink(1, "tcp://127.0.0.1:9", secret=None, run="r")
