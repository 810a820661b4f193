"""Where KV requests are served on the network in a run on several nodes, in files of the run's folder.

Who serves (a stage's leader, or a rank whose leader is on another node) writes down its address, the agent makes it
known through the rendezvous store, and writes down those of all: whoever needs them on this node reads them here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.ipc.roles import rank_role, stage_role
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import write_atomically
from kvlaunch.plan.types import LaunchPlan, StagePlan

_POLL_S = 0.05


class Listeners(msgspec.Struct, frozen=True, kw_only=True):
    """Of one generation of the engine."""

    epoch: int
    endpoints: dict[str, str]
    """Role (kvlaunch/kv/ipc/roles.py) -> `tcp://HOST:PORT`."""


def save(path: Path, listeners: Listeners) -> None:
    write_atomically(path, msgspec.json.encode(listeners))


def load(path: Path, epoch: int) -> dict[str, str]:
    """Role -> endpoint; empty where they are not known (yet) in this epoch."""
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
    far = {stage_role(stage.pp_rank): stage.leader for stage in plan.stages if stage.node_rank != node_rank}
    known = _known(paths, far, epoch, timeout_s)
    return {stage.pp_rank: known.get(stage_role(stage.pp_rank), stage.endpoint) for stage in plan.stages}


def far_ranks(paths: RunPaths, plan: LaunchPlan, stage: StagePlan, epoch: int, *, timeout_s: float) -> dict[int, str]:
    """Global rank -> where the leader of their stage reaches those that are on another node than it.

    Raises:
        KVCommitError: one is not known after `timeout_s` seconds.
    """
    far = {rank_role(rank): rank for rank in stage.ranks if plan.ranks[rank].node_rank != stage.node_rank}
    known = _known(paths, far, epoch, timeout_s)
    return {rank: known[role] for role, rank in far.items()}


def roles(plan: LaunchPlan) -> dict[str, int]:
    """Who serves on the network: role -> node rank."""
    served = {stage_role(stage.pp_rank): stage.node_rank for stage in plan.stages}
    for rank in plan.ranks:
        if rank.node_rank != plan.stages[rank.pp_rank].node_rank:
            served[rank_role(rank.global_rank)] = rank.node_rank
    return served


def _known(paths: RunPaths, wanted: Mapping[str, int], epoch: int, timeout_s: float) -> dict[str, str]:
    """Role -> endpoint of those that are wanted (role -> the global rank that serves)."""
    deadline = time.monotonic() + timeout_s
    while True:
        known = load(paths.listeners, epoch) if wanted else {}
        missing = {role: rank for role, rank in wanted.items() if role not in known}
        if not missing:
            return {role: known[role] for role in wanted}
        if time.monotonic() >= deadline:
            raise KVCommitError(
                f"Where the KV memory of {', '.join(missing)} on another node is served is not known yet.",
                failures=dict.fromkeys(missing.values(), "where its KV memory is served is not known yet"),
            )
        time.sleep(_POLL_S)
