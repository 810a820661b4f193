"""A stage's listener and its peers over real sockets: who may join, what is answered, what is left behind."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.links import LinkClosedError
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.messages import (
    Done,
    Failed,
    Hello,
    HelloRequester,
    Map,
    Ping,
    Pong,
    Refused,
    SetLimit,
    StageState,
    State,
    Undo,
    Unmap,
)
from kvlaunch.kv.ipc.peer import StagePeer
from tests.integration.stage_kit import HEAD, Raw, Stage, connect, memory, wait_for


def test_each_request_has_its_reply(stage: Stage, raw: Raw) -> None:
    assert raw.ask(Ping(**HEAD, seq=7)) == Pong(seq=7, global_rank=0, pid=os.getpid())
    assert raw.ask(Map(**HEAD, seq=8, pages=((3, 1),))) == Done(seq=8)
    state = raw.ask(State(**HEAD, seq=9))
    assert isinstance(state, StageState)
    assert state.ranks == tuple(rank.state() for rank in stage.ranks)
    failed = raw.ask(Map(**HEAD, seq=10, pages=((3, 1),)))
    assert isinstance(failed, Failed)
    assert failed.settled
    assert [(r.global_rank, r.error) for r in failed.results] == [(r, "page 3 is already mapped") for r in (0, 1)]
    assert raw.ask(Unmap(**HEAD, seq=11, pages=((3, 1),))) == Done(seq=11)
    assert raw.ask(Undo(**HEAD, seq=12, of=11)) == Done(seq=12)
    assert [rank.mapped_runs() for rank in stage.ranks] == [[(0, 1), (3, 1)]] * 2


def test_a_repeated_request_gets_the_same_reply_and_an_older_one_none_of_its_effect(stage: Stage, raw: Raw) -> None:
    first = Map(**HEAD, seq=1, pages=((3, 1),))
    assert raw.ask(first) == raw.ask(first) == Done(seq=1)
    failing = Map(**HEAD, seq=2, pages=((3, 1),))
    assert raw.ask(failing) == raw.ask(failing)
    late = raw.ask(Unmap(**HEAD, seq=1, pages=((3, 1),)))
    assert isinstance(late, Refused)
    assert "came after 2" in late.reason
    assert stage.ranks[1].mapped_runs() == [(0, 1), (3, 1)]


@pytest.mark.parametrize("change", [{"run": "other"}, {"epoch": 1}])
def test_another_run_or_epoch_is_refused_and_not_remembered(
    stage: Stage, raw: Raw, change: dict[str, str | int]
) -> None:
    wrong = Map(**{**HEAD, **change}, seq=5, pages=((3, 1),))
    reply = raw.ask(wrong)
    assert isinstance(reply, Refused)
    assert reply.seq == 5
    assert "run r epoch 0" in reply.reason
    assert stage.ranks[0].mapped_runs() == [(0, 1)]
    assert raw.ask(Map(**HEAD, seq=5, pages=((3, 1),))) == Done(seq=5)


def test_limits_go_to_who_asked_for_them(folder: Path) -> None:
    limits: list[int | None] = []
    with Stage(folder, tp_size=1, on_limit=limits.append) as stage, Raw(stage.endpoint) as raw:
        assert raw.ask(SetLimit(**HEAD, seq=1, pages=10)) == Done(seq=1)
        assert raw.ask(SetLimit(**HEAD, seq=2, pages=None)) == Done(seq=2)
    assert limits == [10, None]
    with Stage(folder, tp_size=1) as stage, Raw(stage.endpoint) as raw:
        assert isinstance(raw.ask(SetLimit(**HEAD, seq=1, pages=10)), Refused)


MAP = wire.encode(Map(**HEAD, seq=1, pages=((3, 1),)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda at, by: MAP[:at] + by + MAP[at + len(by) :], st.integers(0, len(MAP)), st.binary(min_size=1, max_size=3)
    )
)
@example(b"")
@example(MAP[:-1])
@example(MAP + b"\0")
@example(msgspec.msgpack.encode(["erase", "r", 0, "m", 1, [[3, 1]]]))
@example(msgspec.msgpack.encode(["map", "r", 0, "m", 1, [[3, -1]]]))
@example(msgspec.msgpack.encode(["map", "r", 0, "m", 1, [[3, 2**63]]]))
@example(msgspec.msgpack.encode(["map", "r", 0, "m", -1, [[0.5, 1]]]))
@example(msgspec.msgpack.encode({"type": "map"}))
@example(b"\x80\x05K\x01.")  # a pickle
def test_garbage_is_answered_and_served_through(stage: Stage, raw: Raw, payload: bytes) -> None:
    raw.socket.send(payload)
    wire.decode_reply(raw.socket.recv())
    assert isinstance(raw.ask(Ping(**HEAD, seq=1)), Pong)
    a, b = (rank.mapped_runs() for rank in stage.ranks)
    assert a == b, "whatever it was taken for, both ranks did the same"


def test_a_requester_of_this_host_is_served_through_garbage_too(stage: Stage) -> None:
    link = connect(stage.peer_path, wire.encode(HelloRequester(sender="m")))
    assert wire.decode_welcome(link.receive()[1]).error is None
    for payload in (b"", b"\xc1", MAP[:-1], b"x" * 200_000):
        link.send(3, payload)
        number, reply = link.receive()
        assert number == 3
        assert isinstance(wire.decode_reply(reply), Refused)
    link.send(4, MAP)
    assert wire.decode_reply(link.receive()[1]) == Done(seq=1)
    link._sock.send(b"short")  # no header: not even a link
    with pytest.raises(LinkClosedError):
        link.receive()
    link.close()
    with closing(stage.channel()) as channel:
        channel.ping()


def test_frames_that_are_no_message_are_dropped(raw: Raw) -> None:
    raw.socket.send_multipart([b"", b"two frames"])
    raw.socket.send_multipart([b"1", b"2", b"3"])
    assert isinstance(raw.ask(Ping(**HEAD, seq=1)), Pong)


def test_a_message_over_the_limit_ends_its_connection_only(stage: Stage, raw: Raw) -> None:
    with Raw(stage.endpoint) as other:
        other.socket.send(b"x" * (wire.MAX_MESSAGE + 1))
        assert isinstance(raw.ask(Ping(**HEAD, seq=1)), Pong)
        other.socket.rcvtimeo = 100
        with pytest.raises(zmq.Again):
            other.socket.recv()
    refused = raw.ask(b"\xc1" * wire.MAX_MESSAGE)
    assert isinstance(refused, Refused)


def test_bytes_that_are_not_zeromq_do_not_stop_it(stage: Stage, raw: Raw) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(stage.endpoint.removeprefix("ipc://"))
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(500))
        assert isinstance(raw.ask(Ping(**HEAD, seq=1)), Pong)


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (Hello(run="other", epoch=0, global_rank=1), "run other"),
        (Hello(run="r", epoch=9, global_rank=1), "epoch 9"),
        (Hello(run="r", epoch=0, global_rank=7), "rank 7 does not belong to stage 0"),
        (Hello(run="r", epoch=0, global_rank=0), "rank 0 does not belong to stage 0"),
        (Hello(run="r", epoch=0, global_rank=1), "rank 1 has joined already"),
    ],
)
def test_who_does_not_belong_is_refused_with_the_reason(stage: Stage, raw: Raw, hello: Hello, says: str) -> None:
    link = connect(stage.peer_path, wire.encode(hello))
    assert says in (wire.decode_welcome(link.receive()[1]).error or "")
    with pytest.raises(LinkClosedError):
        link.receive()
    link.close()
    assert raw.ask(Map(**HEAD, seq=1, pages=((3, 1),))) == Done(seq=1)


def test_who_says_nothing_or_nonsense_keeps_nobody_out(folder: Path) -> None:
    stage = Stage(folder)
    stage.listener.start()
    silent, gone, babbling, short = (connect(stage.peer_path, hello) for hello in (None, None, b"\xff", None))
    gone.close()
    short._sock.send(b"x")
    with closing(stage.channel()) as channel:
        with pytest.raises(KVCommitError, match="rank 1: has not joined"):
            channel.map([(3, 1)])
        stage.peers[0].start()
        stage.listener.wait_ready(10)
        channel.map([(3, 1)])
    for link in (silent, babbling, short):
        link.close()
    stage.__exit__()


def test_waiting_for_peers_names_who_is_missing(folder: Path) -> None:
    stage = Stage(folder, tp_size=4)
    stage.listener.start()
    stage.peers[1].start()
    wait_for(lambda: 2 in stage.listener._stage._links)
    with pytest.raises(KVCommitError, match=r"rank\(s\) 1, 3 have not joined") as caught:
        stage.listener.wait_ready(0.05)
    assert sorted(caught.value.failures) == [1, 3]
    stage.__exit__()


def test_a_peer_that_finds_nobody_gives_up_and_says_why(folder: Path) -> None:
    peer = StagePeer(memory(1), peer_path=folder / "p0", connect_timeout_s=0.1)
    peer.start()
    wait_for(lambda: peer.error)
    assert "could not join a KV listener" in (peer.error or "")
    assert "No such file" in (peer.error or "")
    peer.close()


def test_a_peer_of_another_epoch_is_kept_out(folder: Path) -> None:
    stage = Stage(folder)
    stage.listener.start()
    old = StagePeer(memory(1, epoch=4), peer_path=stage.peer_path, connect_timeout_s=0.2)
    old.start()
    wait_for(lambda: old.error)
    assert "rank 1 belongs to run r epoch 4" in (old.error or "")
    old.close()
    stage.__exit__()


def test_a_peer_joins_again_after_a_broken_connection(stage: Stage) -> None:
    with closing(stage.channel()) as channel:
        channel.map([(3, 1)])
        broken = stage.listener._stage._links[1]
        broken.close()
        wait_for(lambda: stage.listener._stage._links.get(1) not in (None, broken))
        channel.map([(5, 1)])
        assert [rank.mapped_runs() for rank in stage.ranks] == [[(0, 1), (3, 1), (5, 1)]] * 2


def test_a_peer_that_answers_nonsense_is_dropped_and_named(folder: Path) -> None:
    stage = Stage(folder)
    stage.listener.start()
    link = connect(stage.peer_path, wire.encode(Hello(run="r", epoch=0, global_rank=1)))
    assert wire.decode_welcome(link.receive()[1]).error is None
    with Raw(stage.endpoint) as raw:
        raw.socket.send(MAP)
        exchange, _ = link.receive()
        link.send(exchange, b"\xc1")
        reply = wire.decode_reply(raw.socket.recv())
        assert isinstance(reply, Failed)
        assert not reply.settled
        assert [r.global_rank for r in reply.results] == [1]
        assert "could not be read" in (reply.results[0].error or "")
    assert stage.ranks[0].mapped_runs() == [(0, 1)]
    link.close()
    stage.__exit__()


def test_a_late_answer_of_a_peer_is_not_taken_for_the_next_one(folder: Path) -> None:
    stage = Stage(folder)
    stage.listener.start()
    link = connect(stage.peer_path, wire.encode(Hello(run="r", epoch=0, global_rank=1)))
    link.receive()
    with Raw(stage.endpoint) as raw:
        assert isinstance(raw.ask(MAP), Failed)  # the peer has not answered
        late, _ = link.receive()
        link.receive()  # what takes it back
        good = stage.peers[0]._ok
        link.send(late, good)
        refused = raw.ask(Map(**HEAD, seq=2, pages=((4, 1),)))
        assert isinstance(refused, Failed)
        assert not refused.settled
        assert "earlier operation" in (refused.results[0].error or "")
    assert stage.ranks[0].mapped_runs() == [(0, 1)]
    link.close()
    stage.__exit__()


def test_close_ends_an_operation_under_way(folder: Path) -> None:
    stage = Stage(folder)
    stage.listener = StageListener(
        stage.ranks[0], endpoint=stage.endpoint, peer_path=stage.peer_path, peers=[1], peer_timeout_s=60
    )
    stage.listener.start()
    link = connect(stage.peer_path, wire.encode(Hello(run="r", epoch=0, global_rank=1)))
    link.receive()
    with Raw(stage.endpoint) as raw:
        raw.socket.send(MAP)
        link.receive()  # the peer has it, and never answers
        started = time.monotonic()
        stage.listener.close()
        stage.listener.close()
        assert time.monotonic() - started < 5
    link.close()


def test_ten_times_up_and_down(folder: Path) -> None:
    for _ in range(10):
        with Stage(folder, tp_size=3) as stage, closing(stage.channel()) as channel:
            channel.map([(3, 1)])
