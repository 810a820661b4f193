"""The KV cache in a plan: blocks, pages and address space. All page arithmetic of a plan is `plan_kv`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvlaunch.errors import PlanError
from kvlaunch.plan.types import KVPlan

if TYPE_CHECKING:
    from kvlaunch.config.schema import KVConfig

GRANULARITY = {"cpu": 4096, "cuda": 2 * 2**20}
"""Bytes: the smallest piece of physical memory that each backend maps (a small page; cuMemCreate's granularity)."""

MOST_RANGES = 32768
"""Byte ranges of all pages of a rank in host memory, unless kv.page asks for smaller pages. Every second range that is
mapped costs the process two mappings at worst, and the kernel's default allows it 65,530 (vm.max_map_count)."""

_MIN_PAGES = 2
"""The null block's page, and one to work with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """How the engine lays the KV cache out on the ranks, outermost the layers: a layer's blocks follow each other, keys
    and values of a block together or in two strips of their own."""

    block_size: int
    """Tokens in a block."""
    block_bytes: int
    """Bytes of one block in one layer of a rank, keys and values; the same on every rank."""
    stage_layers: tuple[int, ...]
    """Layers that one block id covers on a rank, by pp_rank."""
    strips_per_layer: int = 1
    """2 where keys and values of a layer lie apart, half of the block's bytes each."""

    @property
    def largest(self) -> int:
        """Layers of the largest rank."""
        return max(self.stage_layers)


def blocks_per_page(block_bytes: int, granularity: int, least_bytes: int) -> int:
    """Blocks in the smallest page whose byte range in every strip is a multiple of `granularity`.

    Args:
        block_bytes: bytes of a block in one strip.
        least_bytes: least bytes of a page in one strip, 0 for no wish.
    """
    unit = granularity // math.gcd(granularity, block_bytes)
    wished = max(1, -(-least_bytes // block_bytes))
    return -(-wished // unit) * unit


def plan_kv(config: KVConfig, shape: KVShape, device: Literal["cpu", "cuda"]) -> KVPlan:
    """Pages and blocks that fit into `kv.reserve` on the largest rank. The same for elastic and static.

    Raises:
        PlanError: fewer than two pages fit.
    """
    reserve = int(config.reserve)
    granularity = GRANULARITY[device]
    per_page = _blocks_per_page(config, shape, device)
    page_bytes = per_page * shape.block_bytes * shape.largest
    pages = reserve // page_bytes
    if pages < _MIN_PAGES:
        raise PlanError(
            f"kv.reserve={reserve} holds {pages} pages of {page_bytes} bytes ({per_page} blocks of {shape.block_size} "
            f"tokens, {shape.block_bytes} bytes a block and layer, {shape.largest} layers), and at least {_MIN_PAGES} "
            "are needed: one for the null block, one to work with.",
            hint=f"Use kv.reserve={_MIN_PAGES * page_bytes} or more, or a smaller kv.page.",
        )
    return KVPlan(
        mode=config.mode.value,
        block_size=shape.block_size,
        num_blocks=pages * per_page,
        blocks_per_page=per_page,
        granularity=granularity,
        reserve_bytes=pages * page_bytes,
        guard=config.guard,
        ahead_low=config.ahead.low,
        ahead_high=config.ahead.high,
        cache_keep_bytes=int(config.cache.keep),
        cache_idle_s=config.cache.idle_s,
        commit_timeout_s=config.commit_timeout_s,
    )


def _blocks_per_page(config: KVConfig, shape: KVShape, device: Literal["cpu", "cuda"]) -> int:
    strip_bytes = shape.block_bytes // shape.strips_per_layer
    wished = -(-int(config.page or 0) // shape.strips_per_layer)
    smallest = blocks_per_page(strip_bytes, GRANULARITY[device], wished)
    if device == "cuda" or config.page is not None:
        return smallest
    ranges = int(config.reserve) // (smallest * strip_bytes)
    return smallest * max(1, -(-ranges // MOST_RANGES))


def reserve_for(tokens: int, kv: KVPlan, shape: KVShape) -> int:
    """Least kv.reserve, in bytes, that holds one sequence of so many tokens beside the null block."""
    blocks = -(-tokens // shape.block_size) + 1
    pages = max(_MIN_PAGES, -(-blocks // kv.blocks_per_page))
    return pages * kv.blocks_per_page * shape.block_bytes * shape.largest


def capacity_tokens(kv: KVPlan) -> int:
    """Tokens that the blocks hold beside the null block."""
    return (kv.num_blocks - 1) * kv.block_size
