"""What those who serve KV requests on the network are called."""

from __future__ import annotations


def stage_role(pp_rank: int) -> str:
    """What a stage's listener is called: in its keys, and where its endpoint is made known."""
    return f"stage {pp_rank}"


def rank_role(global_rank: int) -> str:
    """Likewise a rank whose stage's leader is on another host."""
    return f"rank {global_rank}"
