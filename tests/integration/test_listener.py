"""A stage's listener and its peers over real sockets: who may join, what is answered, what is left behind."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.ipc.links import Link, LinkClosedError, listen_seqpacket
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
    Reply,
    SetLimit,
    StageState,
    State,
    Undo,
    Unmap,
)
from kvlaunch.kv.ipc.peer import StagePeer
from kvlaunch.kv.memory.noop import NoopBackend
from kvlaunch.kv.rank import RankMemory
from tests.integration.kv_ranks import GEOMETRY

HEAD = {"run": "r", "epoch": 0, "sender": "m"}


def memory(global_rank: int, *, epoch: int = 0) -> RankMemory:
    region = NoopBackend().reserve(GEOMETRY.region_bytes)
    return RankMemory(region, GEOMETRY, global_rank=global_rank, pp_rank=0, tp_rank=global_rank, run="r", epoch=epoch)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path may have 107 bytes. Nothing but what the test put there may be left."""
    path = Path(tempfile.mkdtemp(prefix="kvl", dir="/tmp"))
    threads, files = threading.active_count(), open_files()
    yield path
    wait_for(lambda: threading.active_count() == threads)
    wait_for(lambda: open_files() == files)
    assert not list(path.iterdir())
    shutil.rmtree(path)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Stage:
    """A listener with its peers, all in this process."""

    def __init__(self, folder: Path, *, tp_size: int = 2, on_limit: Callable[[int | None], None] | None = None) -> None:
        self.ranks = [memory(r) for r in range(tp_size)]
        self.peer_path = folder / "p0"
        self.endpoint = f"ipc://{folder}/s0"
        self.listener = self.new_listener(on_limit)
        self.peers = [StagePeer(r, peer_path=self.peer_path, connect_timeout_s=10) for r in self.ranks[1:]]

    def new_listener(self, on_limit: Callable[[int | None], None] | None = None) -> StageListener:
        return StageListener(
            self.ranks[0],
            endpoint=self.endpoint,
            peer_path=self.peer_path,
            peers=range(1, len(self.ranks)),
            peer_timeout_s=0.5,
            on_limit=on_limit,
        )

    def __enter__(self) -> Stage:
        self.listener.start()
        for peer in self.peers:
            peer.start()
        self.listener.wait_ready(10)
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.close()
        self.listener.close()

    def channel(self) -> ZmqChannel:
        return ZmqChannel(
            {0: self.endpoint},
            leaders={0: 0},
            run="r",
            epoch=0,
            sender="m",
            timeout_s=2.0,
            sockets={0: self.peer_path},
        )


class Raw:
    """Sends bytes to a listener, and reads what comes."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        self.socket.connect(endpoint)

    def ask(self, payload: bytes | msgspec.Struct) -> Reply:
        self.socket.send(payload if isinstance(payload, bytes) else wire.encode(payload))
        return wire.decode_reply(self.socket.recv())

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    with Stage(folder) as stage:
        yield stage


@pytest.fixture
def raw(stage: Stage) -> Iterator[Raw]:
    with Raw(stage.endpoint) as raw:
        yield raw


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


def connect(path: Path, hello: bytes | None) -> Link:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5)
    sock.connect(os.fspath(path))
    link = Link(sock)
    if hello is not None:
        link.send(0, hello)
    return link


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


def leave_dead_socket(path: Path, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(os.fspath(path))


def test_what_a_dead_process_left_is_replaced(folder: Path) -> None:
    leave_dead_socket(folder / "s0", socket.SOCK_STREAM)
    leave_dead_socket(folder / "p0", socket.SOCK_SEQPACKET)
    with Stage(folder) as stage, closing(stage.channel()) as channel:
        channel.map([(3, 1)])


def test_a_live_listener_is_not_pushed_away(stage: Stage) -> None:
    with pytest.raises(OSError, match="another process listens there"):
        stage.new_listener().start()
    with closing(stage.channel()) as channel:
        channel.map([(3, 1)])


def test_a_live_peer_socket_is_not_pushed_away(folder: Path) -> None:
    other = listen_seqpacket(folder / "p0", 1)
    with pytest.raises(OSError, match="another process listens there"):
        Stage(folder).listener.start()
    other.close()
    (folder / "p0").unlink()


def test_a_channel_finds_a_listener_that_comes_late_or_again(folder: Path) -> None:
    first, second = Stage(folder, tp_size=1), Stage(folder, tp_size=1)
    with closing(first.channel()) as channel:
        starter = threading.Timer(0.1, first.listener.start)
        starter.start()
        channel.map([(3, 1)])
        starter.join()
        first.listener.close()
        with second:
            channel.map([(4, 1)])
    assert second.ranks[0].mapped_runs() == [(0, 1), (4, 1)]


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "s0").write_text("mine")
    with pytest.raises(FileExistsError):
        Stage(folder).listener.start()
    assert (folder / "s0").read_text() == "mine"
    (folder / "s0").unlink()


def test_a_folder_that_does_not_exist_is_an_error_and_leaves_nothing(folder: Path) -> None:
    rank = memory(0)
    for endpoint, peer_path in ((f"ipc://{folder}/no/s0", folder / "p0"), (f"ipc://{folder}/s0", folder / "no/p0")):
        listener = StageListener(rank, endpoint=endpoint, peer_path=peer_path, peers=[1])
        with pytest.raises(OSError):
            listener.start()
        listener.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "ipc://relative", "ipc://@abstract", "/tmp/s0"])
def test_only_files_that_others_cannot_reach_are_endpoints(folder: Path, endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        StageListener(memory(0), endpoint=endpoint, peer_path=folder / "p0", peers=[])


def test_sockets_are_for_their_owner_alone(stage: Stage, folder: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 2


def test_another_user_is_turned_away(stage: Stage, raw: Raw) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    pid = os.fork()
    if pid == 0:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(5)
                os.chmod(stage.peer_path, 0o666)  # noqa: PTH101
                os.chmod(stage.peer_path.parent, 0o755)  # noqa: PTH101
                os.setuid(12345)
                sock.connect(os.fspath(stage.peer_path))
                os._exit(0 if sock.recv(100) == b"" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert isinstance(raw.ask(Ping(**HEAD, seq=1)), Pong)


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


@pytest.mark.parametrize("size", [0, 1, 59_999, 60_000, 60_001, 150_000, 1 << 20])
def test_links_carry_messages_of_any_size(size: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a, b = Link(ours), Link(theirs)
    payload = os.urandom(size)
    sender = threading.Thread(target=a.send, args=(5, payload))
    sender.start()
    number, body = b.receive()
    sender.join()
    assert (number, bytes(body)) == (5, payload)
    b.send(6, b"short")
    assert bytes(a.receive()[1]) == b"short"
    a.close()
    with pytest.raises(LinkClosedError):
        b.receive()
    b.close()


def test_a_link_waits_until_its_deadline() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a, b = Link(ours), Link(theirs)
    a.limit_waits(0.1)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        a.receive(started + 0.12)
    assert 0.12 <= time.monotonic() - started < 1
    with pytest.raises(TimeoutError):
        a.receive(started)
    with pytest.raises(BlockingIOError):
        send_until_full(a)
    a.close()
    b.close()


def send_until_full(link: Link) -> None:
    for number in range(100_000):
        link.send(number, b"nobody reads")


def test_a_link_knows_when_the_other_side_is_gone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a, b = Link(ours), Link(theirs)
    assert not a.gone()
    b.send(1, b"unread")
    assert not a.gone()
    b.close()
    assert a.receive()[0] == 1
    assert a.gone()
    with pytest.raises(LinkClosedError):
        a.receive()
    with pytest.raises(LinkClosedError):
        a.send(2, b"")
    a.close()
    a.close()
    assert a.gone()
