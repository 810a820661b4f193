"""A stage's listener on the network, strangers who try to talk to it, and a cable between that can be cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import monitor

from kvlaunch.kv.ipc import network
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.messages import PageRun
from kvlaunch.kv.ipc.peer import FarPeer
from kvlaunch.kv.ipc.roles import stage_role
from kvlaunch.secret import Secret, new_secret
from tests.integration.stage_kit import Raw, Stage, memory

SECRET = new_secret()
LOCAL = "tcp://127.0.0.1:0"


class NetworkStage(Stage):
    """A stage whose listener is on the network too."""

    def __init__(self, folder: Path, *, network: str = LOCAL, secret: Secret | None = SECRET, **kwargs: Any) -> None:
        super().__init__(folder, network=network, secret=secret, **kwargs)

    @property
    def address(self) -> str:
        assert self.listener.network_endpoint is not None
        return self.listener.network_endpoint

    @property
    def port(self) -> int:
        return network.split(self.address)[1]

    def remote(self, endpoint: str | None = None, **kwargs: Any) -> ZmqChannel:
        """A channel as another host has it."""
        options: dict[str, Any] = {"run": "r", "epoch": 0, "sender": "m", "timeout_s": 2.0, "secret": SECRET, **kwargs}
        return ZmqChannel({0: endpoint or self.address}, leaders={0: 0}, **options)


class FarStage:
    """A stage whose second rank is on another host than its leader, who reaches it over a cable."""

    def __init__(self, folder: Path, *, secret: Secret | None = SECRET, epoch: int = 0, role: int = 1) -> None:
        self.ranks = [memory(0), memory(1, epoch=epoch)]
        named = memory(role, epoch=epoch) if role != 1 else self.ranks[1]
        self.peer = FarPeer(named, endpoint=LOCAL, secret=secret)
        self.listener = StageListener(
            self.ranks[0],
            endpoint=f"ipc://{folder}/s0",
            peer_path=folder / "p0",
            peers=[1],
            peer_timeout_s=1.0,
            secret=SECRET,
        )

    def __enter__(self) -> FarStage:
        self.peer.start()
        self.cable = Cable(network.split(self.peer.endpoint)[1])
        self.listener.start()
        self.listener.reach(1, self.cable.endpoint)
        self.listener.wait_ready(0)
        endpoint = self.listener._endpoint
        self.channel = ZmqChannel({0: endpoint}, leaders={0: 0}, run="r", epoch=0, sender="m", timeout_s=2.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.listener.close()
        self.cable.close()
        self.peer.close()

    @property
    def mapped_of_leader(self) -> list[PageRun]:
        return self.ranks[0].mapped_runs()

    @property
    def mapped(self) -> list[list[PageRun]]:
        return [rank.mapped_runs() for rank in self.ranks]


class RemoteRaw(Raw):
    """Sends bytes to a listener over the network, as one who knows the secret."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        network.connect(self.socket, endpoint, secret=SECRET, run="r", role=stage_role(0))


def handshake(sock: zmq.Socket[bytes], endpoint: str) -> bool:
    """Connect; whether the first handshake succeeds. Sockets that are refused try again until they are closed."""
    events = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED)
    events.rcvtimeo = 10_000
    sock.connect(endpoint)
    event = monitor.recv_monitor_message(events)["event"]
    sock.disable_monitor()
    events.close()
    return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)


FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class Cable:
    """TCP between a channel and a listener, which can be cut in several ways.

    Attributes:
        sent: what went to the listener over the connections so far.
        bend: changes what is sent to the listener, or returns b"" to lose it and end the connection.
        bend_back: the same the other way.
    """

    def __init__(self, port: int) -> None:
        self.sent: list[bytearray] = []
        self.bend: Callable[[bytes], bytes] = lambda data: data
        self.bend_back: Callable[[bytes], bytes] = lambda data: data
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._muted: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def connections(self) -> int:
        return len(self._pairs)

    def mute(self) -> None:
        """Nothing comes through the connections of now any more, yet nobody is told. New ones work."""
        self._muted.update(end for pair in self._pairs for end in pair)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port))
                except OSError:  # nobody is there any more
                    near.close()
                    continue
                sent = bytearray()
                self._pairs.append((near, far))
                self.sent.append(sent)
                ways = ((near, far, sent, True), (far, near, bytearray(), False))
                for way in ways:
                    self._threads.append(threading.Thread(target=self._carry, args=way))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket, seen: bytearray, forth: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if source in self._muted:
                    continue
                data = self.bend(data) if forth else self.bend_back(data)
                if not data:
                    break
                seen += data
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._server.close()
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for pair in self._pairs:
            for end in pair:
                end.close()

    def __enter__(self) -> Cable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
