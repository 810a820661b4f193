"""Numbers that a KVCacheManager gives of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStats:
    """Numbers of a KVCacheManager: of this moment, and totals since it was made."""

    mapped_pages: int
    """Pages that have memory on every rank, page 0 and those about to be given back included."""
    touched_pages: int
    """Pages that had memory at any time so far."""
    free_pages: int
    """Of these, the ones in service with no block in use (page 0 never counts)."""
    retiring_pages: int
    """Of these, the ones out of service that wait for steps in flight or for the ranks."""
    limit_pages: int
    in_use_blocks: int
    """Blocks handed out, those that an engine's prefix cache keeps included."""
    maps: int
    """Map operations that were applied on every rank."""
    unmaps: int
    failed_maps: int
    failed_unmaps: int
    stalls: int
    """Times that the owner thread waited for the ranks."""
    stalled_steps: int
    """Steps during which it did so at least once."""
    stall_seconds: float
    steps: int
    """Steps scheduled."""
