"""Strangers and nonsense at a stage's listener, over the network and over its socket: nothing is applied."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.curve import KeyPair, client_keys, server_keys
from kvlaunch.kv.ipc.messages import Done, Map, Ping, Pong, Refused
from kvlaunch.kv.ipc.roles import stage_role
from kvlaunch.secret import new_secret
from tests.integration.network_kit import SECRET, NetworkStage, RemoteRaw, handshake
from tests.integration.stage_kit import HEAD, Raw

MAP = wire.encode(Map(**HEAD, seq=1, pages=((3, 1),)))
CLIENT, SERVER = client_keys(SECRET, "r"), server_keys(SECRET, "r", stage_role(0)).public


def random_keys() -> KeyPair:
    public, private = zmq.curve_keypair()
    return KeyPair(public, private)


@pytest.fixture
def stage(folder: Path) -> Iterator[NetworkStage]:
    with NetworkStage(folder) as stage:
        yield stage


@pytest.mark.parametrize(
    ("keys", "server", "served"),
    [
        (CLIENT, SERVER, True),
        (None, None, False),
        (random_keys(), SERVER, False),
        (client_keys(new_secret(), "r"), SERVER, False),
        (client_keys(SECRET, "other"), SERVER, False),
        (CLIENT, server_keys(SECRET, "r", stage_role(1)).public, False),
        (CLIENT, server_keys(new_secret(), "r", stage_role(0)).public, False),
    ],
    ids=["owner", "no keys", "other keys", "other secret", "other run", "other stage", "other server"],
)
def test_only_who_knows_the_secret_is_served(
    stage: NetworkStage, keys: KeyPair | None, server: bytes | None, served: bool
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        if keys is not None:
            sock.curve_publickey, sock.curve_secretkey = keys.public, keys.private
            sock.curve_serverkey = server
        assert handshake(sock, stage.address) is served
    with RemoteRaw(stage.address) as owner:
        assert isinstance(owner.ask(Ping(**HEAD, seq=1)), Pong)
        if not served:
            assert stage.ranks[0].mapped_runs() == [(0, 1)]
            assert owner.ask(MAP) == Done(seq=1)


@pytest.mark.parametrize("way", ["network", "socket"])
def test_nonsense_changes_nothing(stage: NetworkStage, way: str) -> None:
    chance = random.Random(7)
    fields = msgspec.msgpack.decode(MAP)
    with (RemoteRaw if way == "network" else Raw)(stage.address if way == "network" else stage.endpoint) as owner:
        assert owner.ask(Map(**HEAD, seq=5, pages=((9, 1),))) == Done(seq=5)
        bad = [MAP[:at] for at in range(len(MAP))]
        bad += [MAP + chance.randbytes(chance.randint(1, 9)) for _ in range(30)]
        bad += [b"\xc1" + chance.randbytes(chance.randint(0, 300)) for _ in range(60)]
        bad += [msgspec.msgpack.encode([tag, *fields[1:]]) for tag in ("erase", "", "Map", 1, None)]
        bad += [wire.encode(Map(**{**HEAD, **other}, seq=9, pages=((3, 1),))) for other in ({"run": "x"}, {"epoch": 1})]
        bad += [MAP, b"\xc1" * wire.MAX_MESSAGE]  # an older operation; the largest message
        for payload in bad:
            assert isinstance(owner.ask(payload), Refused), payload[:80]
        owner.socket.send(b"x" * (wire.MAX_MESSAGE + 1000))  # ends the connection, which is made anew
        with (RemoteRaw if way == "network" else Raw)(stage.address if way == "network" else stage.endpoint) as other:
            assert isinstance(other.ask(Ping(**HEAD, seq=1)), Pong)
    assert [rank.mapped_runs() for rank in stage.ranks] == [[(0, 1), (9, 1)]] * 2


def test_bytes_that_are_not_zeromq_do_not_stop_it(stage: NetworkStage) -> None:
    chance = random.Random(11)
    null = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    curve = null.replace(b"NULL" + bytes(1), b"CURVE")
    starts = [b"", b"GET / HTTP/1.1\r\n\r\n", null, curve, null[:11], curve + b"\x04\xc8\x05HELLO"]
    for round_ in range(60):
        with socket.create_connection(("127.0.0.1", stage.port), timeout=5) as sock, suppress(OSError):
            sock.sendall(starts[round_ % len(starts)] + chance.randbytes(chance.randint(0, 400)))
            sock.sendall(MAP)
    with closing(stage.remote()) as channel:
        assert [rank.mapped_runs() for rank in stage.ranks] == [[(0, 1)]] * 2
        channel.map([(3, 1)])
