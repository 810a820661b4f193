"""Talk to the stages' listeners: what each rank has mapped, and how much it may map."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.ipc.messages import RankState
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import load_agent
from kvlaunch.plan.types import LaunchPlan

if TYPE_CHECKING:
    from kvlaunch.kv.ipc.client import ZmqChannel

_POLL_S = 0.02


def rank_states(paths: RunPaths, plan: LaunchPlan, *, timeout_s: float) -> list[RankState]:
    """The KV state of every rank, by global rank.

    Raises:
        KVCommitError: a stage did not answer within `timeout_s` seconds.
    """
    with _channel(paths, plan, timeout_s) as channel:
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
def _channel(paths: RunPaths, plan: LaunchPlan, timeout_s: float) -> Iterator[ZmqChannel]:
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
        yield channel
    finally:
        channel.close()
