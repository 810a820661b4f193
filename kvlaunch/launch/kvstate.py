"""Talk to the stages' listeners: what each rank has mapped, and how much it may map."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.ipc.messages import RankState
from kvlaunch.launch import listeners
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import load_agent
from kvlaunch.plan.types import LaunchPlan
from kvlaunch.secret import load_secret

if TYPE_CHECKING:
    from kvlaunch.kv.ipc.client import ZmqChannel

_POLL_S = 0.02


def rank_states(paths: RunPaths, plan: LaunchPlan, *, timeout_s: float, here: bool = False) -> list[RankState]:
    """The KV state of every rank, by global rank.

    Args:
        here: only of the stages whose leader is on this node.

    Raises:
        KVCommitError: a stage did not answer within `timeout_s` seconds, or is not known yet.
    """
    if here and _node_rank(paths) not in {stage.node_rank for stage in plan.stages}:
        return []
    with _channel(paths, plan, timeout_s, here=here) as channel:
        states: list[RankState] = channel.state()
        return states


def limit_ranks(paths: RunPaths, plan: LaunchPlan, pages: int | None, *, timeout_s: float) -> list[RankState]:
    """Have every rank keep at most so many pages mapped (None: no limit), and wait until all of them say so.

    Returns:
        Their states then. A rank whose pages are in use reaches a lower limit as they are freed.

    Raises:
        KVCommitError: the engine does not take a limit, or a rank did not take it within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    with _channel(paths, plan, timeout_s) as channel:
        channel.set_limit(pages)
        while True:
            states: list[RankState] = channel.state()
            behind = [state.global_rank for state in states if state.limit_pages != pages]
            if not behind:
                return states
            if time.monotonic() > deadline:
                reason = f"does not keep the new limit after {timeout_s:g} s"
                raise KVCommitError(
                    f"The limit did not reach rank(s) {', '.join(map(str, behind))} within {timeout_s:g} s.",
                    failures=dict.fromkeys(behind, reason),
                )
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _channel(paths: RunPaths, plan: LaunchPlan, timeout_s: float, *, here: bool = False) -> Iterator[ZmqChannel]:
    # Loaded here, since most commands have no need of ZeroMQ.
    from kvlaunch.kv.ipc.client import ZmqChannel

    agent = load_agent(paths)
    epoch, node_rank = agent.epoch if agent else 0, _node_rank(paths)
    stages = [stage for stage in plan.stages if stage.node_rank == node_rank or not here]
    if here:
        endpoints = {stage.pp_rank: stage.endpoint for stage in stages}
    else:
        endpoints = listeners.endpoints(paths, plan, node_rank, epoch)
    channel = ZmqChannel(
        endpoints,
        leaders={stage.pp_rank: stage.leader for stage in stages},
        run=plan.run,
        epoch=epoch,
        secret=load_secret(paths.secret, {}) if plan.nnodes > 1 else None,
        sender=f"ask-{os.getpid()}-{time.monotonic_ns()}",
        timeout_s=timeout_s,
    )
    try:
        yield channel
    finally:
        channel.close()


def _node_rank(paths: RunPaths) -> int:
    agent = load_agent(paths)
    return agent.node_rank or 0 if agent else 0
