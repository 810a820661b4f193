"""Ask the stages' listeners what each rank has mapped."""

from __future__ import annotations

import os
import time

from kvlaunch.kv.ipc.messages import RankState
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import load_agent
from kvlaunch.plan.types import LaunchPlan


def rank_states(paths: RunPaths, plan: LaunchPlan, *, timeout_s: float) -> list[RankState]:
    """The KV state of every rank, by global rank.

    Raises:
        KVCommitError: a stage did not answer within `timeout_s` seconds.
    """
    # Loaded here, since most commands have no need of ZeroMQ.
    from kvlaunch.kv.ipc.client import ZmqChannel

    agent = load_agent(paths, 0)
    channel = ZmqChannel(
        {stage.pp_rank: stage.endpoint for stage in plan.stages},
        leaders={stage.pp_rank: stage.leader for stage in plan.stages},
        run=plan.run,
        epoch=agent.epoch if agent else 0,
        sender=f"ask-{os.getpid()}-{time.monotonic_ns()}",
        timeout_s=timeout_s,
    )
    try:
        states: list[RankState] = channel.state()
    finally:
        channel.close()
    return states
