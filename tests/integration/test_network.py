"""A stage's listener over the network: who is served, what a bad link does, and what a person is told."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvlaunch.errors import ConfigError, KVCommitError
from kvlaunch.kv.ipc import network
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.messages import Done, Ping, Pong, SetLimit
from kvlaunch.kv.memory.noop import NoopBackend
from kvlaunch.kv.rank import RankMemory
from kvlaunch.secret import new_secret
from tests.integration.kv_ranks import GEOMETRY
from tests.integration.network_kit import LOCAL, SECRET, Cable, NetworkStage, RemoteRaw
from tests.integration.stage_kit import HEAD, Raw, wait_for


@pytest.fixture
def stage(folder: Path) -> Iterator[NetworkStage]:
    with NetworkStage(folder) as stage:
        yield stage


@pytest.fixture
def cable(stage: NetworkStage) -> Iterator[Cable]:
    with Cable(stage.port) as cable:
        yield cable


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_it_serves_as_it_does_on_one_host(folder: Path, host: str) -> None:
    limits: list[int | None] = []
    with NetworkStage(folder, network=f"tcp://{host}:0", on_limit=limits.append) as stage:
        assert stage.port > 0
        with closing(stage.remote(f"tcp://{host}:{stage.port}")) as channel, Raw(stage.endpoint) as raw:
            channel.map([(3, 2), (9, 1)])
            channel.unmap([(4, 1)])
            assert [rank.mapped_runs() for rank in stage.ranks] == [[(0, 1), (3, 1), (9, 1)]] * 2
            assert channel.state() == [rank.state() for rank in stage.ranks]
            with RemoteRaw(stage.address) as far:
                assert far.ask(SetLimit(**HEAD, seq=9, pages=7)) == Done(seq=9)
            assert isinstance(raw.ask(Ping(**HEAD, seq=1)), Pong)
    assert limits == [7]


def test_largest_operations_pass(stage: NetworkStage) -> None:
    pages = [(page, 1) for page in range(2, 256, 2)]
    with closing(stage.remote()) as channel:
        for _ in range(3):
            channel.map(pages)
            channel.unmap(pages)


def test_without_a_secret_nothing_is_bound_and_nobody_is_called(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"stage 0 on tcp://127.0.0.1:0 needs the run's secret") as error:
        NetworkStage(folder, secret=None)
    assert "kvlaunch secret new" in (error.value.hint or "")
    with pytest.raises(ConfigError, match=r"stage 3 at tcp://10.0.0.1:99 needs the run's secret"):
        ZmqChannel({2: "ipc:///tmp/no", 3: "tcp://10.0.0.1:99"}, leaders={2: 2, 3: 3}, run="r", epoch=0, sender="m")


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://h", "tcp://::1:0", "tcp://h:99999", "tcp://a;b:1", "h:1"],
)
def test_only_an_address_that_others_can_use_is_one(folder: Path, endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        NetworkStage(folder, network=endpoint)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_what_cannot_be_bound_is_an_error_and_leaves_nothing(folder: Path, host: str) -> None:
    listener = NetworkStage(folder, network=f"tcp://{host}:0").listener
    with pytest.raises(OSError, match=f"cannot bind tcp://{host}:0: "):
        listener.start()
    listener.close()


def test_a_port_that_is_taken_is_an_error(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot bind {endpoint}: Address already in use"):
            NetworkStage(folder, network=endpoint).listener.start()


def test_an_unknown_host_is_named(folder: Path) -> None:
    with pytest.raises(KVCommitError, match=r"Rank 4: .* stage 2 .*tcp://no-such-host.invalid:1: ") as error:
        ZmqChannel(
            {0: LOCAL[:-1] + "9", 2: "tcp://no-such-host.invalid:1"},
            leaders={0: 0, 2: 4},
            run="r",
            epoch=0,
            sender="m",
            secret=SECRET,
        )
    assert list(error.value.failures) == [4]


def test_one_stages_listener_is_not_taken_for_anothers(stage: NetworkStage, folder: Path) -> None:
    region = NoopBackend().reserve(GEOMETRY.region_bytes)
    rank = RankMemory(region, GEOMETRY, global_rank=2, pp_rank=1, tp_rank=0, run="r", epoch=0)
    second = StageListener(
        rank, endpoint=f"ipc://{folder}/s1", peer_path=folder / "p1", peers=[], network=LOCAL, secret=SECRET
    )
    second.start()
    options: dict[str, Any] = {
        "leaders": {0: 0, 1: 2},
        "run": "r",
        "epoch": 0,
        "sender": "m",
        "timeout_s": 0.4,
        "secret": SECRET,
    }
    with closing(ZmqChannel({0: second.network_endpoint or "", 1: stage.address}, **options)) as swapped:
        with pytest.raises(KVCommitError) as error:
            swapped.map([(3, 1)])
        assert sorted(error.value.failures) == [0, 2]
    assert rank.mapped_runs() == stage.ranks[0].mapped_runs() == [(0, 1)]
    with closing(ZmqChannel({0: stage.address, 1: second.network_endpoint or ""}, **options)) as right:
        right.map([(3, 1)])
    assert rank.mapped_runs() == stage.ranks[1].mapped_runs() == [(0, 1), (3, 1)]
    second.close()


def test_a_reply_that_was_lost_with_its_connection_is_asked_for_again(stage: NetworkStage, cable: Cable) -> None:
    with closing(stage.remote(cable.endpoint)) as channel:
        channel.ping()
        lost = []

        def lose_one(data: bytes) -> bytes:
            if lost:
                return data
            lost.append(data)
            return b""

        cable.bend_back = lose_one
        channel.map([(3, 1)])
        assert lost
        assert cable.connections >= 2
        channel.map([(5, 1)])
    assert [rank.mapped_runs() for rank in stage.ranks] == [[(0, 1), (3, 1), (5, 1)]] * 2


def test_a_changed_byte_changes_nothing(stage: NetworkStage, cable: Cable) -> None:
    with closing(stage.remote(cable.endpoint)) as channel:
        channel.ping()
        for at in (-1, -10, 20):
            bent = []

            def flip(data: bytes, at: int = at, bent: list[bytes] = bent) -> bytes:
                if bent or len(data) < 40:
                    return data
                bent.append(data)
                changed = bytearray(data)
                changed[at] ^= 1
                return bytes(changed)

            cable.bend = flip
            channel.map([(3, 1)])  # by its repetition, over a new connection
            assert bent
            channel.unmap([(3, 1)])
    assert cable.connections >= 4


def test_what_was_overheard_is_of_no_use(folder: Path) -> None:
    with NetworkStage(folder, tp_size=1) as first, Cable(first.port) as cable:
        with closing(first.remote(cable.endpoint)) as channel:
            channel.map([(3, 1)])
        assert first.ranks[0].mapped_runs() == [(0, 1), (3, 1)]
        heard = bytes(cable.sent[0])
    assert b"map" not in heard
    with NetworkStage(folder, tp_size=1) as second:  # it remembers no sequence number
        with socket.create_connection(("127.0.0.1", second.port), timeout=10) as replay:
            replay.sendall(heard)
            while replay.recv(4096):
                pass
        assert second.ranks[0].mapped_runs() == [(0, 1)]
        with closing(second.remote()) as channel:
            channel.map([(3, 1)])


def test_a_link_that_went_silent_is_noticed_and_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_HEARTBEAT_MS", 100)
    monkeypatch.setattr(network, "SILENCE_MS", 300)
    with NetworkStage(folder) as stage, Cable(stage.port) as cable:
        with closing(stage.remote(cable.endpoint, timeout_s=0.3)) as channel:
            channel.map([(3, 1)])
            cable.mute()
            with pytest.raises(KVCommitError) as error:
                channel.map([(4, 1)])
            assert not error.value.settled

            def works() -> bool:
                try:
                    channel.map([(5, 1)])
                except KVCommitError:
                    return False
                return True

            wait_for(works)
            assert cable.connections >= 2
        assert [rank.mapped_runs() for rank in stage.ranks] == [[(0, 1), (3, 1), (5, 1)]] * 2


def failing(action: Callable[[], object]) -> str:
    with pytest.raises(KVCommitError) as error:
        action()
    assert list(error.value.failures) == [0]
    return str(error.value)


def test_errors_name_host_stage_and_rank_and_what_is_known(folder: Path) -> None:
    with NetworkStage(folder, tp_size=1) as stage:
        endpoint = f"tcp://localhost:{stage.port}"
        channel, stranger = (stage.remote(endpoint, timeout_s=0.4, secret=secret) for secret in (SECRET, new_secret()))
        channel.ping()
        said = failing(lambda: stranger.map([(3, 1)]))
        assert "Could not map page 3 on every rank: rank 0: the listener of stage 0 did not answer" in said
        assert f"({endpoint}: it takes connections; does its process hang, or has it another secret or run?)" in said
    said = failing(channel.ping)
    assert f"rank 0: the listener of stage 0 did not answer within 0.40 s ({endpoint}: Connection refused)" in said
    with NetworkStage(folder, tp_size=1, network=endpoint):
        channel.ping()
    channel.close()
    stranger.close()


def test_nobody_at_all_is_said_too(folder: Path) -> None:
    with socket.socket() as full:  # its queue is full, so that it answers no further attempt, as a firewall would
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(address)
        endpoint = f"tcp://127.0.0.1:{address[1]}"
        with closing(
            ZmqChannel({0: endpoint}, leaders={0: 0}, run="r", epoch=0, sender="m", timeout_s=0.4, secret=SECRET)
        ) as channel:
            assert f"({endpoint}: nothing there answers an attempt to connect" in failing(channel.ping)
        for sock in fill:
            sock.close()


def test_another_epoch_is_told_so(stage: NetworkStage) -> None:
    with closing(stage.remote(epoch=1)) as survivor:
        assert "belongs to run r epoch 0, the request to run r epoch 1" in failing(lambda: survivor.map([(3, 1)]))
    assert stage.ranks[0].mapped_runs() == [(0, 1)]


def test_ten_times_up_and_down(folder: Path) -> None:
    for _ in range(10):
        with NetworkStage(folder) as stage, closing(stage.remote()) as channel:
            channel.map([(3, 1)])
