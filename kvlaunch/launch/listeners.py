"""Where the KV listeners of a run on several nodes are, in files of the run's folder.

A listener's rank writes down its network address, the agent makes it known through the rendezvous store, and writes
down those of all stages: whoever needs them on this node reads them here.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from kvlaunch.errors import KVCommitError
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import write_atomically
from kvlaunch.plan.types import LaunchPlan

_POLL_S = 0.05


class Listeners(msgspec.Struct, frozen=True, kw_only=True):
    """Of one generation of the engine."""

    epoch: int
    endpoints: dict[int, str]
    """pp_rank -> `tcp://HOST:PORT`."""


def save(path: Path, listeners: Listeners) -> None:
    write_atomically(path, msgspec.json.encode(listeners))


def load(path: Path, epoch: int) -> dict[int, str]:
    """pp_rank -> endpoint; empty where they are not known (yet) in this epoch."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Listeners)
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
    return found.endpoints if found.epoch == epoch else {}


def endpoints(
    paths: RunPaths, plan: LaunchPlan, node_rank: int, epoch: int, *, timeout_s: float = 0.0
) -> dict[int, str]:
    """pp_rank -> where this node reaches the stage's listener: by its socket where it is here, else by the network.

    Raises:
        KVCommitError: that of another node is not known after `timeout_s` seconds.
    """
    far = {stage.pp_rank: stage.leader for stage in plan.stages if stage.node_rank != node_rank}
    deadline = time.monotonic() + timeout_s
    known: dict[int, str] = {}
    while far and not far.keys() <= (known := load(paths.listeners, epoch)).keys():
        if time.monotonic() >= deadline:
            missing = {leader: "its KV listener is not known yet" for pp, leader in far.items() if pp not in known}
            stages = ", ".join(str(pp) for pp in far if pp not in known)
            raise KVCommitError(
                f"The KV listener of stage {stages} on another node is not known yet.", failures=missing
            )
        time.sleep(_POLL_S)
    return {stage.pp_rank: known[stage.pp_rank] if stage.pp_rank in far else stage.endpoint for stage in plan.stages}
