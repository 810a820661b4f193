"""Which rank a process inside an engine is: resolved here and nowhere else."""

from __future__ import annotations

import os

from kvlaunch import env as keys
from kvlaunch.env import RunEnv
from kvlaunch.errors import CompatibilityError
from kvlaunch.plan.types import LaunchPlan, RankPlan, StagePlan


def resolve_rank(plan: LaunchPlan, global_rank: int) -> RankPlan:
    """The plan's entry for a rank that an engine reports.

    Raises:
        CompatibilityError: the engine counts ranks otherwise than the plan does.
    """
    if not 0 <= global_rank < plan.world_size:
        raise CompatibilityError(
            f"{plan.engine} started rank {global_rank}, but the plan has world_size={plan.world_size} "
            f"(tp={plan.tp_size} x pp={plan.pp_size})."
        )
    return plan.ranks[global_rank]


def rank_at(plan: LaunchPlan, *, pp_rank: int, tp_rank: int) -> RankPlan:
    """The plan's entry for the place that an engine reports.

    Raises:
        CompatibilityError: there is no such place in the plan.
    """
    for rank in plan.ranks:
        if (rank.pp_rank, rank.tp_rank) == (pp_rank, tp_rank):
            return rank
    raise CompatibilityError(
        f"{plan.engine} started a rank at stage {pp_rank}, tp rank {tp_rank}, but the plan has tp={plan.tp_size}, "
        f"pp={plan.pp_size}."
    )


def stage_of(plan: LaunchPlan, rank: RankPlan) -> StagePlan:
    return plan.stages[rank.pp_rank]


EXPORTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", keys.GLOBAL_RANK, keys.WORLD_SIZE, keys.TP_RANK, keys.PP_RANK)


def exported() -> dict[str, str]:
    """What this process's environment says of its rank."""
    return {name: os.environ[name] for name in EXPORTED if name in os.environ}


def export_rank(run: RunEnv, plan: LaunchPlan, rank: RankPlan) -> None:
    """Put the rank into this process's environment, with torchrun's names and kvlaunch's own."""
    os.environ.update(
        {
            "RANK": str(rank.global_rank),
            "WORLD_SIZE": str(plan.world_size),
            "LOCAL_RANK": str(rank.local_rank),
            keys.RUN_ID: run.run,
            keys.GLOBAL_RANK: str(rank.global_rank),
            keys.WORLD_SIZE: str(plan.world_size),
            keys.TP_RANK: str(rank.tp_rank),
            keys.PP_RANK: str(rank.pp_rank),
        }
    )
