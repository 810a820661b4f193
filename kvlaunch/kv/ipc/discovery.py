"""Where the stages' listeners are: written to and read from the rendezvous store, which all nodes of a run reach.

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
"""What a stage still gets after the others have used up the time: enough to find what is there already."""


class Store(Protocol):
    """What is used of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...


def publish(store: Store, *, run: str, epoch: int, pp_rank: int, endpoint: str) -> None:
    """Say where a stage's listener is.

    Args:
        endpoint: `tcp://HOST:PORT` as other hosts reach it.

    Raises:
        ValueError: not such an endpoint.
        RendezvousError: the store cannot be reached.
    """
    _check(endpoint)
    try:
        store.set(_key(run, epoch, pp_rank), endpoint)
    except RuntimeError as error:
        raise RendezvousError(
            f"Stage {pp_rank} could not say where its KV listener is ({endpoint}): {_first_line(error)}"
        ) from error


def look_up(store: Store, *, run: str, epoch: int, stages: Iterable[int], timeout_s: float) -> dict[int, str]:
    """Wait until the stages have said where their listeners are.

    Returns:
        pp_rank -> endpoint.

    Raises:
        RendezvousError: names the stages that have not within `timeout_s` seconds, or said nonsense.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[int, str] = {}
    missing: dict[int, str] = {}
    for pp in stages:
        key = _key(run, epoch, pp)
        try:
            store.wait([key], timedelta(seconds=max(_LAST_LOOK_S, deadline - time.monotonic())))
            endpoint = store.get(key).decode()
            _check(endpoint)
            found[pp] = endpoint
        except RuntimeError as error:  # of which all of torch's are: a time-out, a broken connection
            missing[pp] = _first_line(error)
        except ValueError as error:  # UnicodeDecodeError is one
            missing[pp] = str(error)
    if missing:
        names = f"stage{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise RendezvousError(
            f"Run {run} epoch {epoch}: {names} did not say within {timeout_s:g} s where the KV listener is"
            f" ({'; '.join(dict.fromkeys(missing.values()))}).",
            hint="See the logs of the nodes that hold these stages: their ranks had not reserved the KV cache yet.",
        )
    return found


def _key(run: str, epoch: int, pp_rank: int) -> str:
    return f"kvlaunch/{run}/{epoch}/kv/{pp_rank}"


def _check(endpoint: str) -> None:
    if split(endpoint)[1] == 0:
        raise ValueError(f"endpoint {endpoint!r}: its port is not known yet")


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
