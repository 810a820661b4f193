"""What the parts of the KV cache need to know, free of the launcher's plan."""

from __future__ import annotations

from dataclasses import dataclass


def check_limit(pages: int | None) -> None:
    """Raises ValueError for a limit that leaves no room for page 0."""
    if pages is not None and pages < 1:
        raise ValueError(f"a limit of {pages} pages is not possible: page 0 is always mapped; use at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """Settings of one KVCacheManager; the same on every rank of a run."""

    num_blocks: int
    """Blocks of address space, block 0 included; a multiple of blocks_per_page."""
    blocks_per_page: int
    ahead_low: int
    """Free mapped pages below which the background thread maps ahead, while the engine is busy."""
    ahead_high: int
    """Free mapped pages up to which it maps ahead. Both double after a step that had to wait, see Watermarks."""
    limit_pages: int | None = None
    """Pages that may be mapped at once, the null block's included; None: all."""
    limit_binds: bool = True
    """Whether `ensure` keeps the limit. False: the owner keeps it by what it asks for, in blocks; what it asks for is
    mapped, and the limit only says what goes back at once and what may be mapped ahead."""
    commit_timeout_s: float = 5.0
    """Deadline of one map or unmap over all ranks."""
    idle_s: float = 0.5
    """Seconds without an allocation after which the pages mapped ahead go back, all but one."""
    backoff_s: float = 0.05
    """Pause after a failed map before the next attempt; doubles up to 1 s."""
