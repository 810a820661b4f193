"""Addresses at which a run's server is reached from this host."""

from __future__ import annotations

from kvlaunch.plan.types import ServerPlan


def local_address(server: ServerPlan) -> tuple[str, int]:
    """(host, port) to connect to: an address that means "every interface" is reached through loopback."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host), server.port


def url_of(server: ServerPlan) -> str:
    host, port = local_address(server)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
