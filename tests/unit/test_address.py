"""Which address the other nodes are told."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from kvlaunch.plan import address
from kvlaunch.plan.address import address_towards, endpoint_here, is_local, joined_endpoint, split_endpoint


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


def test_without_a_route_to_the_outside_it_is_the_interfaces_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    def source(_family: int, to: tuple[str | int, ...]) -> str | None:
        return "127.0.0.1" if str(to[0]).startswith("127.") else None

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(address, "_source", source)
    give_interfaces(monkeypatch)
    assert address_towards("myhost:29400") == "10.9.8.7"


def give_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback, an interface that is down, one with IPv6 before IPv4, of which one is link-local."""

    def entry(family: socket.AddressFamily, addr: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=addr)

    interfaces = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "down0": [entry(socket.AF_INET, "10.0.0.1")],
        "eth0": [
            entry(socket.AF_INET6, "fe80::1%eth0"),
            entry(socket.AF_INET6, "fd00::7"),
            entry(socket.AF_INET, "10.9.8.7"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {n: SimpleNamespace(isup=n != "down0") for n in interfaces})


@pytest.mark.parametrize("name", ["nodeseven.cluster.example", "nodeseven"])
def test_a_host_that_does_not_know_its_own_name_goes_by_its_address(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "gethostname", lambda: "nodeseven.cluster.example")
    give_interfaces(monkeypatch)
    assert endpoint_here(f"{name}:29400") == "10.9.8.7:29400"
    assert endpoint_here("nodeeight:29400") == "nodeeight:29400"
    assert endpoint_here("10.0.0.9:29400") == "10.0.0.9:29400"


def test_what_is_not_known_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert address_towards("nowhere:29400") is None
    assert not is_local("nowhere")


def test_somebody_elses_address_is_not_local() -> None:
    assert not is_local("192.0.2.1")
