"""Where KV requests are served on the network: written to and read from the rendezvous store, which all nodes reach.

What stands there is not to be trusted, and need not be: the keys (curve.py) make sure who answers at an endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

from kvlaunch.errors import RendezvousError
from kvlaunch.kv.ipc.network import split

_LAST_LOOK_S = 0.05
"""What one still gets after the others have used up the time: enough to find what is there already."""


class Store(Protocol):
    """What is used of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...


def publish(store: Store, *, run: str, epoch: int, role: str, endpoint: str) -> None:
    """Say where the listener of a stage, or the memory of a rank whose leader is on another host, is served.

    Args:
        role: which one (roles.py).
        endpoint: `tcp://HOST:PORT` as other hosts reach it.

    Raises:
        ValueError: not such an endpoint.
        RendezvousError: the store cannot be reached.
    """
    _check(endpoint)
    try:
        store.set(_key(run, epoch, role), endpoint)
    except RuntimeError as error:
        raise RendezvousError(
            f"{role.capitalize()} could not say where its KV memory is served ({endpoint}): {_first_line(error)}"
        ) from error


def look_up(store: Store, *, run: str, epoch: int, roles: Iterable[str], timeout_s: float) -> dict[str, str]:
    """Wait until all of them have said where they serve.

    Returns:
        role -> endpoint.

    Raises:
        RendezvousError: names those that have not within `timeout_s` seconds, or said nonsense.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    for role in roles:
        key = _key(run, epoch, role)
        try:
            store.wait([key], timedelta(seconds=max(_LAST_LOOK_S, deadline - time.monotonic())))
            endpoint = store.get(key).decode()
            _check(endpoint)
            found[role] = endpoint
        except RuntimeError as error:  # of which all of torch's are: a time-out, a broken connection
            missing[role] = _first_line(error)
        except ValueError as error:  # UnicodeDecodeError is one
            missing[role] = str(error)
    if missing:
        raise RendezvousError(
            f"Run {run} epoch {epoch}: {', '.join(missing)} did not say within {timeout_s:g} s where its KV is served"
            f" ({'; '.join(dict.fromkeys(missing.values()))}).",
            hint="See the logs of the nodes that hold these: their ranks had not reserved the KV cache yet.",
        )
    return found


def _key(run: str, epoch: int, role: str) -> str:
    return f"kvlaunch/{run}/{epoch}/kv/{role}"


def _check(endpoint: str) -> None:
    if split(endpoint)[1] == 0:
        raise ValueError(f"endpoint {endpoint!r}: its port is not known yet")


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
