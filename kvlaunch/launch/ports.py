"""Ports of this host: is one free, and if not, whose is it."""

from __future__ import annotations

import errno
import socket

from kvlaunch import env
from kvlaunch.errors import ConfigError
from kvlaunch.launch.paths import all_runs
from kvlaunch.launch.procfs import command_of, environ_has


def free_port(host: str) -> int:
    """A TCP port that nobody uses at this moment.

    Raises:
        ConfigError: host is not an address of this machine.
    """
    with _bound(host, 0, f"server.host={host}") as sock:
        port: int = sock.getsockname()[1]
        return port


def require_free(host: str, port: int, setting: str) -> None:
    """Check that a server can be started on host:port.

    Args:
        setting: what to call it in the error, `server.port=8000`.

    Raises:
        ConfigError: it is taken; the message names the owner's process id and command.
    """
    _bound(host, port, setting).close()


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
        sock.listen(1)
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
        if environ_has(owner, env.RUN_ID, paths.run):
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
