"""SGLang's KV pools over reserved address space.

A model has one pool, or two where some of its layers have a sliding window: one for them, one for the others, each with
slots of its own. The two lie in one region, one behind the other, and each has its own pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlaunch.engines.rank_kv import RankKV
from kvlaunch.errors import CompatibilityError
from kvlaunch.kv.geometry import BlockGeometry

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from kvlaunch.kv.rank import RankMemory

FULL, SLIDING = "Full", "SWA"
"""`allocation_label` of the two pools, in the order in which SGLang makes them. That of an only pool is None."""

_STATIC = "Start with kv=static."


def create_buffers(pool: MHATokenToKVPool, kv: RankKV) -> RankMemory:
    """`MHATokenToKVPool._create_buffers_normal`: keys and values of each layer in strips of their own.

    A block of kvlaunch is a page of SGLang (`page_size` slots); block 0 takes the writes of padded tokens. SGLang's own
    buffers of a layer hold the values behind the keys, where they start on no page's border.

    Returns:
        The memory of the pool's blocks.

    Raises:
        CompatibilityError: a pool of another kind or size than the plan's.
    """
    check(pool, kv)
    plan = kv.plan.kv
    row_bytes = pool.head_num * pool.head_dim * pool.store_dtype.itemsize
    rows = pool.size + pool.page_size
    strip_bytes = rows * row_bytes
    start = 0 if kv.memory is None else kv.memory.geometry.region_bytes
    geometry = BlockGeometry.from_strips(
        [(start + strip * strip_bytes, pool.page_size * row_bytes) for strip in range(2 * pool.layer_num)],
        num_blocks=plan.num_blocks,
        blocks_per_page=plan.blocks_per_page,
        granularity=plan.granularity,
    )
    first = kv.memory is None
    if first:
        kv.reserve(geometry, nbytes=2 * _layers(kv) * strip_bytes)
    memory = kv.memory if first else kv.share(geometry)
    assert memory is not None  # reserve has made it
    region = memory.region.tensor()
    strips = [
        region[base : base + strip_bytes].view(pool.store_dtype).view(rows, pool.head_num, pool.head_dim)
        for base, _ in geometry.strips
    ]
    pool.k_buffer, pool.v_buffer = strips[0::2], strips[1::2]
    return memory


def check(pool: MHATokenToKVPool, kv: RankKV) -> None:
    """Raises CompatibilityError where the plan's pages do not fit the pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    kind, plan, label = type(pool).__name__, kv.plan.kv, pool.allocation_label
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd" or pool.head_dim != pool.v_head_dim:
        raise CompatibilityError(
            f"SGLang made a KV pool ({kind}, layout {pool.kv_cache_layout}) that does not work with kv=elastic yet.",
            hint=_STATIC,
        )
    first, layers = kv.memory is None, _layers(kv)
    left = layers if kv.memory is None else layers - len(kv.memory.geometry.strips) // 2
    fits = {
        None: first and pool.layer_num == left,
        FULL: first and 0 < pool.layer_num < left,
        SLIDING: not first and pool.layer_num == left,
    }
    if not fits.get(label, False):
        raise CompatibilityError(
            f"SGLang made a KV pool ({label or kind}) of {pool.layer_num} layers for {left} of a rank's {layers}; "
            "kv=elastic serves one pool for all, or two: for the layers with full attention, and those with a sliding "
            "window.",
            hint=_STATIC,
        )
    got = (pool.page_size, pool.size + pool.page_size)
    wanted = (plan.block_size, plan.num_blocks * plan.block_size)
    if got != wanted:
        raise CompatibilityError(
            f"SGLang made a KV pool of page_size {got[0]} with {got[1]} slots where the plan has {wanted[0]} with "
            f"{wanted[1]}."
        )
    planned = kv.rank.kv_bytes_per_token // layers
    token_bytes = 2 * pool.head_num * pool.head_dim * pool.store_dtype.itemsize
    if token_bytes != planned:
        raise CompatibilityError(
            f"A token takes {token_bytes} bytes a layer in SGLang's KV pool; the plan has {planned}."
        )


def _layers(kv: RankKV) -> int:
    first, last = kv.rank.layers
    return last - first + 1
