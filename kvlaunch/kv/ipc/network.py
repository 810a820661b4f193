"""KV requests over the network: CurveZMQ on TCP, for those who know the run's secret."""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.curve import KeyPair, client_keys, server_keys
from kvlaunch.secret import Secret, require_secret

log = logging.getLogger(__name__)

TCP = "tcp://"
_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]@;*]+):(?P<port>\d{1,5})")
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"kvlaunch"
_HEARTBEAT_MS = 1000
SILENCE_MS = 3000
"""Milliseconds after which a connection over which nothing comes, not even a heartbeat, is closed, and made anew."""
_SEALING_BYTES = 128
"""CurveZMQ, and the number of an exchange, take less than this beside a message, and the limit counts it."""
_STRANGERS_REMEMBERED = 64


def split(endpoint: str) -> tuple[str, int]:
    """Host (IPv6 without its brackets) and port of `tcp://HOST:PORT`.

    Raises:
        ValueError: it is none.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"endpoint {endpoint!r}: must be {TCP}HOST:PORT, an IPv6 address in brackets")
    return match["host"].strip("[]"), int(match["port"])


def numeric(endpoint: str) -> str:
    """The endpoint with its host as an address: IPv4 where the name has one, on either side of a connection.

    ZeroMQ would ask for the name at every attempt to connect, in the thread that serves all connections.

    Raises:
        OSError: the name is not known.
        ValueError: it is no endpoint.
    """
    host, port = split(endpoint)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        host = str(found[0][4][0])
        address = ipaddress.ip_address(host)
    return f"{TCP}[{host}]:{port}" if address.version == 6 else f"{TCP}{host}:{port}"


def connect(sock: zmq.Socket[bytes], address: str, *, secret: Secret, run: str, role: str) -> None:
    """Connect a socket to the one with that role (roles.py), and to no other. The address is a numeric endpoint."""
    _secure(sock, client_keys(secret, run), address)
    sock.curve_serverkey = server_keys(secret, run, role).public
    sock.connect(address)


def _secure(sock: zmq.Socket[bytes], keys: KeyPair, address: str) -> None:
    sock.curve_publickey = keys.public
    sock.curve_secretkey = keys.private
    for option, value in (
        (zmq.IPV6, address.startswith(f"{TCP}[")),
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
        (zmq.HEARTBEAT_TTL, SILENCE_MS),
        (zmq.HANDSHAKE_IVL, SILENCE_MS),
        (zmq.CONNECT_TIMEOUT, SILENCE_MS),
    ):
        sock.setsockopt(option, value)


def serve(router: zmq.Socket[bytes], answer: Callable[[bytes], bytes]) -> None:
    """Answer requests until the socket's context is terminated, and close the socket."""
    try:
        while True:
            frames = router.recv_multipart()
            if len(frames) == 2:
                router.send_multipart((frames[0], answer(frames[1])))
    except zmq.ContextTerminated:
        pass
    finally:
        router.close()


class NetworkServer:
    """Two threads: one serves requests (ROUTER), one decides who may connect.

    Args:
        endpoint: `tcp://HOST:PORT`, HOST one of this host's addresses, by which the others reach it; port 0: any.
        role: whose requests are served (roles.py).
        answer: makes the reply to a request's bytes.
        name: of the threads.

    Raises:
        ValueError: not such an endpoint, or one for every interface.
        ConfigError: there is no secret.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        secret: Secret | None,
        run: str,
        role: str,
        answer: Callable[[bytes], bytes],
        name: str,
    ) -> None:
        host, _ = split(endpoint)
        if host in ("0.0.0.0", "::"):
            raise ValueError(f"endpoint {endpoint!r}: must have the address by which the other hosts reach this one")
        secret = require_secret(secret, f"The KV listener of {role} on {endpoint}")
        self.endpoint = endpoint
        """With the address and port that it is bound to, once started."""
        self._keys = server_keys(secret, run, role)
        self._client = z85.decode(client_keys(secret, run).public)
        self._answer = answer
        self._name = name
        self._strangers: set[str] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address is not this host's, or the port is taken.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate, router = context.socket(zmq.REP), context.socket(zmq.ROUTER)
        gate.linger = router.linger = 0
        try:
            gate.bind(_ZAP)  # before the router: it takes nobody in while nobody decides
            address = numeric(self.endpoint)
            _secure(router, self._keys, address)
            router.curve_server = True
            router.zap_domain = _DOMAIN
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE + _SEALING_BYTES)
            router.bind(address)
            self.endpoint = router.get_string(zmq.LAST_ENDPOINT)
        except OSError as error:  # zmq.ZMQError is none of these
            _close(context, gate, router)
            raise OSError(error.errno, f"cannot bind {self.endpoint}: {error.strerror}") from error
        except zmq.ZMQError as error:
            _close(context, gate, router)
            raise OSError(error.errno or errno.EINVAL, f"cannot bind {self.endpoint}: {error.strerror}") from error
        self._context = context
        self._threads = [
            threading.Thread(target=serve, args=(router, self._answer), name=f"{self._name}-net", daemon=True),
            threading.Thread(target=self._decide_all, args=(gate,), name=f"{self._name}-gate", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads. May be called twice."""
        if self._context is not None:
            self._context.term()  # ends the waits of both, and waits for them to close their sockets
            self._context = None
        for thread in self._threads:
            thread.join()

    def _decide_all(self, gate: zmq.Socket[bytes]) -> None:
        try:
            while True:
                gate.send_multipart(self._decision(gate.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            gate.close()

    def _decision(self, frames: list[bytes]) -> list[bytes]:
        """The answer to a request of ZeroMQ's authentication protocol (RFC 27)."""
        version, number, _, address, _, mechanism, *credentials = frames
        if mechanism == b"CURVE" and credentials == [self._client]:
            return [version, number, b"200", b"OK", b"kvlaunch", b""]
        host = address.decode(errors="replace")
        if host not in self._strangers and len(self._strangers) < _STRANGERS_REMEMBERED:  # it will try again and again
            self._strangers.add(host)
            log.warning("%s: a requester at %s was refused: it does not know this run's secret", self.endpoint, host)
        return [version, number, b"400", b"not of this run", b"", b""]


def _close(context: zmq.Context[zmq.Socket[bytes]], *sockets: zmq.Socket[bytes]) -> None:
    for sock in sockets:
        sock.close()
    context.term()
