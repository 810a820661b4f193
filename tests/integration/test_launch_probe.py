"""What counts as an answer of the engine's HTTP server."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvlaunch.errors import ConfigError
from kvlaunch.launch.ports import hold_port, port_of, require_free
from kvlaunch.launch.probe import NotAnswering, complete_one_token, requests_in_work
from kvlaunch.launch.urls import local_address, url_of
from kvlaunch.plan.types import ServerPlan


class Server:
    """Answers every request with `status` and `body`; `hang` makes it silent."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.asked: list[bytes] = []
        self.hang = threading.Event()
        self.hang.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.asked.append(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
                outer.hang.wait(10)
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *what: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_a_completion_with_a_choice_is_an_answer(server: Server) -> None:
    server.body = b'{"choices": [{"text": ""}]}'
    complete_one_token("127.0.0.1", server.port, "m", timeout_s=5)
    assert b'"max_tokens": 1' in server.asked[0]
    assert b'"model": "m"' in server.asked[0]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (500, b"dead", "answered 500: dead"),
        (404, b"no model", "answered 404"),
        (200, b"not json", "no completion"),
        (200, b"[]", "no completion"),
        (200, b'{"choices": []}', "without a choice"),
    ],
)
def test_everything_else_is_not(server: Server, status: int, body: bytes, says: str) -> None:
    server.status, server.body = status, body
    with pytest.raises(NotAnswering, match=says):
        complete_one_token("127.0.0.1", server.port, "m", timeout_s=5)


def test_silence_ends_at_the_deadline(server: Server) -> None:
    server.hang.clear()
    with pytest.raises(NotAnswering, match="did not answer within"):
        complete_one_token("127.0.0.1", server.port, "m", timeout_s=0.2)


def test_no_server_is_not_an_answer() -> None:
    with hold_port("127.0.0.1") as held, pytest.raises(NotAnswering, match="ConnectionRefusedError"):
        complete_one_token("127.0.0.1", port_of(held), "m", timeout_s=5)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (
            b'# HELP x\nvllm:num_requests_running{engine="0",model_name="a b"} 2.0\n'
            b'vllm:num_requests_waiting{engine="0",model_name="a b"} 1.0\n'
            b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0\n',
            3,
        ),
        (b"sglang:num_running_reqs 4.0\n", 4),
        (b"something_else 1\n", None),
    ],
)
def test_requests_in_work(server: Server, body: bytes, count: float | None) -> None:
    server.body = body
    assert requests_in_work("127.0.0.1", server.port, timeout_s=5) == count


def test_no_metrics_means_not_known(server: Server) -> None:
    server.status = 404
    assert requests_in_work("127.0.0.1", server.port, timeout_s=5) is None


@pytest.mark.parametrize(
    ("host", "address", "url"),
    [
        ("0.0.0.0", ("127.0.0.1", 80), "http://127.0.0.1:80"),
        ("::", ("::1", 80), "http://[::1]:80"),
        ("example", ("example", 80), "http://example:80"),
    ],
)
def test_where_a_server_is_reached(host: str, address: tuple[str, int], url: str) -> None:
    server = ServerPlan(host=host, port=80)
    assert local_address(server) == address
    assert url_of(server) == url


def test_a_port_in_use_names_its_owner(server: Server) -> None:
    import os

    with pytest.raises(ConfigError, match=rf"x=1: the port is taken by process {os.getpid()} \("):
        require_free("127.0.0.1", server.port, "x=1")


@pytest.mark.parametrize(("host", "says"), [("203.0.113.1", "cannot listen"), ("nohost.invalid", "not a host name")])
def test_a_host_that_is_not_ours(host: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        hold_port(host)


def test_a_held_port_is_for_the_server_that_names_it() -> None:
    with hold_port("127.0.0.1") as held, socket.socket() as server, socket.socket() as other:
        require_free("127.0.0.1", port_of(held), "x=1")  # a launch of this port goes on
        with pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())  # without SO_REUSEADDR: what bind(0) would never be given either
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(held.getsockname())
        server.listen()
        with pytest.raises(ConfigError, match="the port is taken by process"):
            hold_port("127.0.0.1", port_of(held))


IP_LOCAL_PORT_RANGE = 51
"""From linux/in.h, since Linux 6.3: the ports from which the kernel chooses for this socket."""


def any_port_of(sock: socket.socket, only: int) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", only << 16 | only))
    except OSError:
        pytest.skip("this kernel cannot be told which port to choose")


def test_a_held_port_is_given_to_nobody_who_asks_for_any_port(server: Server) -> None:
    with hold_port("127.0.0.1") as held, socket.socket() as store, socket.socket() as client:
        any_port_of(store, port_of(held))
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            store.bind(("127.0.0.1", 0))
        any_port_of(client, port_of(held))
        with pytest.raises(OSError, match="assign"):
            client.connect(("127.0.0.1", server.port))
