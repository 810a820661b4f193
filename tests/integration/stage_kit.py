"""A stage's listener with its peers in one process, and ways to talk to it, for the tests of both."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.ipc.links import Link
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.messages import (
    Reply,
)
from kvlaunch.kv.ipc.peer import StagePeer
from kvlaunch.kv.memory.noop import NoopBackend
from kvlaunch.kv.rank import RankMemory
from tests.integration.kv_ranks import GEOMETRY

HEAD = {"run": "r", "epoch": 0, "sender": "m"}


def memory(global_rank: int, *, epoch: int = 0) -> RankMemory:
    region = NoopBackend().reserve(GEOMETRY.region_bytes)
    return RankMemory(region, GEOMETRY, global_rank=global_rank, pp_rank=0, tp_rank=global_rank, run="r", epoch=epoch)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Stage:
    """A listener with its peers, all in this process."""

    def __init__(self, folder: Path, *, tp_size: int = 2, **listener: Any) -> None:
        self._listener = listener
        self.ranks = [memory(r) for r in range(tp_size)]
        self.peer_path = folder / "p0"
        self.endpoint = f"ipc://{folder}/s0"
        self.listener = self.new_listener()
        self.peers = [StagePeer(r, peer_path=self.peer_path, connect_timeout_s=10) for r in self.ranks[1:]]

    def new_listener(self) -> StageListener:
        return StageListener(
            self.ranks[0],
            endpoint=self.endpoint,
            peer_path=self.peer_path,
            peers=range(1, len(self.ranks)),
            peer_timeout_s=0.5,
            **self._listener,
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


def connect(path: Path, hello: bytes | None) -> Link:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5)
    sock.connect(os.fspath(path))
    link = Link(sock)
    if hello is not None:
        link.send(0, hello)
    return link
