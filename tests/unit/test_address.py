"""Which address the other nodes are told."""

from __future__ import annotations

import socket

import pytest

from kvlaunch.plan import address
from kvlaunch.plan.address import address_towards, is_local, joined_endpoint, split_endpoint


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("a:1", ("a", 1)),
        ("a", ("a", 0)),
        ("[fd00::1]:29400", ("fd00::1", 29400)),
        ("[fd00::1]", ("fd00::1", 0)),
        ("10.0.0.1:29400", ("10.0.0.1", 29400)),
    ],
)
def test_endpoints_come_apart_and_together(endpoint: str, parts: tuple[str, int]) -> None:
    assert split_endpoint(endpoint) == parts
    if parts[1]:
        assert joined_endpoint(*parts) == endpoint


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_endpoint_on_this_host_is_reached_from_itself(host: str) -> None:
    assert address_towards(joined_endpoint(host, 29400)) in ("127.0.0.1", "::1")
    assert is_local(host)


def test_a_name_that_is_loopback_only_here_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    def source(_family: int, to: tuple[str | int, ...]) -> str:
        return "127.0.0.1" if str(to[0]).startswith("127.") else "10.1.2.3"

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(address, "_source", source)
    assert address_towards("myhost:29400") == "10.1.2.3"


def test_what_is_not_known_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert address_towards("nowhere:29400") is None
    assert not is_local("nowhere")


def test_somebody_elses_address_is_not_local() -> None:
    assert not is_local("192.0.2.1")
