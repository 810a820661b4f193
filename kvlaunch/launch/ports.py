"""Ports of this host: is one free, whose is it if not, and keeping it until the engine listens on it."""

from __future__ import annotations

import errno
import socket

from kvlaunch import env
from kvlaunch.errors import ConfigError
from kvlaunch.launch.paths import all_runs
from kvlaunch.launch.procfs import command_of, environ_has


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Keep a TCP port for a server that this host will start, for as long as the returned socket is open.

    The socket is bound and does not listen. The kernel gives its port to nobody who asks for any free one, as the
    engine's and the rendezvous' own stores do; a server that names the port and sets SO_REUSEADDR, as vLLM and SGLang
    do, can listen on it.

    Args:
        port: 0 for any free one.

    Raises:
        ConfigError: host is not an address of this machine, or somebody listens on the port.
    """
    return _bound(host, port, f"server.host={host}" if port == 0 else f"server.port={port}")


def port_of(sock: socket.socket) -> int:
    """The port that a socket is bound to."""
    port: int = sock.getsockname()[1]
    return port


def require_free(host: str, port: int, setting: str) -> None:
    """Check that a server can be started on host:port.

    Args:
        setting: what to call it in the error, `server.port=8000`.

    Raises:
        ConfigError: it is taken; the message names the owner's process id and command.
    """
    with _bound(host, port, setting) as sock:
        try:
            sock.listen(1)
        except OSError as exc:  # bound by somebody else between the two calls
            raise _taken(port, setting) from exc


def _bound(host: str, port: int, setting: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=1)[0]
    except socket.gaierror as exc:
        raise ConfigError(f"{setting}: {host} is not a host name or address known here ({exc.strerror}).") from exc
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do it: connections of an earlier server that linger in TIME_WAIT are no obstacle.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise _taken(port, setting) from exc
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port}: {exc.strerror}.",
            hint="server.host must be an address of this machine: 127.0.0.1 for itself alone, 0.0.0.0 for the network.",
        ) from exc
    return sock


def _taken(port: int, setting: str) -> ConfigError:
    owner = listening_pid(port)
    if owner is None:
        who = "a process of another user" if port else "another process"
        return ConfigError(f"{setting}: the port is taken by {who}.", hint="Name another port, or 0 for any free one.")
    hint = f"End it (kill {owner}), name another port, or 0 for any free one."
    for paths in all_runs():
        if environ_has(owner, env.RUN_DIR, str(paths.root)):
            hint = f"That is run {paths.run}: end it (kvlaunch stop {paths.run}), or name another port or 0."
    return ConfigError(f"{setting}: the port is taken by process {owner} ({command_of(owner)[:200]}).", hint=hint)


def listening_pid(port: int) -> int | None:
    """The process that listens on a TCP port of this host, or None where none can be seen."""
    import psutil

    for connection in psutil.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port and connection.pid:
            return int(connection.pid)
    return None
