"""The address by which other nodes reach this one: the one that this host would use to reach where they meet."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator

_RESOLVE_S = 2.0
"""Name servers that do not answer must not hold up a plan."""
_ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses for documentation (RFC 5737, RFC 3849): nothing is sent there, only the route is asked for."""

_Resolved = tuple[int, tuple[str | int, ...]]
"""Address family, and the address as `connect` takes it."""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host (IPv6 without its brackets) and port of HOST:PORT; port 0 where none is named."""
    host, _, port = endpoint.rpartition(":") if not endpoint.endswith("]") else (endpoint, "", "0")
    if not host:
        host, port = port, "0"
    return host.strip("[]"), int(port) if port.isdigit() else 0


def joined_endpoint(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(endpoint: str) -> str | None:
    """This host's address on the way to an endpoint, by the kernel's routes; None where it cannot be told now.

    A name of this host may resolve to a loopback address here and to another elsewhere (Debian's /etc/hosts has
    127.0.1.1): then it is the address on the way to the outside, and where no route leads there the first one of an
    interface that is up. An endpoint that is loopback by name keeps all nodes on this host.
    """
    host, port = split_endpoint(endpoint)
    for family, address in _resolved(host, port or 1):
        found = _source(family, address)
        if found is None:
            continue
        if not ipaddress.ip_address(found).is_loopback or host == "localhost" or _is_address(host):
            return found
        for far, far_family in _ELSEWHERE:
            if (outside := _source(far_family, (far, 9))) is not None:
                return outside
        return next(_of_interfaces(), found)
    return None


def endpoint_here(endpoint: str) -> str:
    """The endpoint as this host reaches it: with its own address where it does not know its own name."""
    host, port = split_endpoint(endpoint)
    if _is_address(host) or not _is_own_name(host) or _asked(host, port):
        return endpoint
    return next((joined_endpoint(addr, port) for addr in _of_interfaces()), endpoint)


def is_local(host: str) -> bool:
    """Whether the name or address is one of this host's own, so that a server can be started on it."""
    for family, address in _resolved(host, 0):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            try:
                sock.bind((address[0], 0, *address[2:]))
            except OSError:
                continue
            return True
    return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _source(family: int, address: tuple[str | int, ...]) -> str | None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(address)  # UDP: chooses the route and sends nothing
        except OSError:
            return None
        return str(sock.getsockname()[0])


def _of_interfaces() -> Iterator[str]:
    """This host's addresses that others may reach, IPv4 first."""
    import psutil

    up = {name for name, about in psutil.net_if_stats().items() if about.isup}
    addresses = [entry for name, entries in psutil.net_if_addrs().items() if name in up for entry in entries]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in addresses:
            if entry.family == family and not entry.address.startswith(("127.", "fe80:", "169.254.", "::1")):
                yield entry.address


def _is_own_name(host: str) -> bool:
    own = socket.gethostname()
    return host in (own, own.partition(".")[0])


def _resolved(host: str, port: int) -> list[_Resolved]:
    """What a name stands for, IPv4 first; empty where that is not known, or not within _RESOLVE_S.

    A host that does not know its own name, as a container may not, has it stand for its own addresses.
    """
    if found := _asked(host, port):
        return found
    if not _is_own_name(host):
        return []
    return [(socket.AF_INET6 if ":" in addr else socket.AF_INET, (addr, port)) for addr in _of_interfaces()]


def _asked(host: str, port: int) -> list[_Resolved]:
    """What the name servers and /etc/hosts say."""
    found: list[_Resolved] = []

    def ask() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        inet: dict[_Resolved, None] = {}
        for family, _, _, _, address in entries:
            if family in (socket.AF_INET, socket.AF_INET6):
                inet[int(family), tuple(part for part in address if isinstance(part, str | int))] = None
        found.extend(sorted(inet, key=lambda entry: entry[0] != socket.AF_INET))

    if _is_address(host):
        ask()
        return found
    thread = threading.Thread(target=ask, name="kvlaunch-resolve", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    return list(found)
