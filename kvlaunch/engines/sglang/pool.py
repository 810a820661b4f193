"""SGLang's KV pool over reserved address space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlaunch.engines.rank_kv import RankKV
from kvlaunch.errors import CompatibilityError
from kvlaunch.kv.geometry import BlockGeometry

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def create_buffers(pool: MHATokenToKVPool, kv: RankKV) -> None:
    """`MHATokenToKVPool._create_buffers_normal`: keys and values of each layer in strips of their own.

    A block of kvlaunch is a page of SGLang (`page_size` slots); block 0 takes the writes of padded tokens. SGLang's own
    buffers of a layer hold the values behind the keys, where they start on no page's border.

    Raises:
        CompatibilityError: a pool of another kind or size than the plan's.
    """
    check(pool, kv)
    rows = pool.size + pool.page_size
    row_bytes = pool.head_num * pool.head_dim * pool.store_dtype.itemsize
    strip_bytes = rows * row_bytes
    plan = kv.plan.kv
    geometry = BlockGeometry.from_strips(
        [(strip * strip_bytes, pool.page_size * row_bytes) for strip in range(2 * pool.layer_num)],
        num_blocks=plan.num_blocks,
        blocks_per_page=plan.blocks_per_page,
        granularity=plan.granularity,
    )
    region = kv.reserve(geometry)
    strips = [
        region[start : start + strip_bytes].view(pool.store_dtype).view(rows, pool.head_num, pool.head_dim)
        for start in range(0, geometry.region_bytes, strip_bytes)
    ]
    pool.k_buffer, pool.v_buffer = strips[0::2], strips[1::2]


def check(pool: Any, kv: RankKV) -> None:
    """Raises CompatibilityError where the plan's pages do not fit the pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    kind, plan = type(pool).__name__, kv.plan.kv
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd" or pool.head_dim != pool.v_head_dim:
        raise CompatibilityError(
            f"SGLang made a KV pool ({kind}, layout {pool.kv_cache_layout}) that does not work with kv=elastic yet.",
            hint="Start with kv=static.",
        )
    if kv.memory is not None:
        raise CompatibilityError(
            "SGLang made a second KV pool; kv=elastic serves models with one.", hint="Start with kv=static."
        )
    got = (pool.page_size, pool.size + pool.page_size)
    wanted = (plan.block_size, plan.num_blocks * plan.block_size)
    if got != wanted:
        raise CompatibilityError(
            f"SGLang made a KV pool of page_size {got[0]} with {got[1]} slots where the plan has {wanted[0]} with "
            f"{wanted[1]}."
        )
    planned = kv.rank.kv_bytes_per_token
    token_bytes = 2 * pool.layer_num * pool.head_num * pool.head_dim * pool.store_dtype.itemsize
    if token_bytes != planned:
        raise CompatibilityError(f"A token takes {token_bytes} bytes in SGLang's KV pool; the plan has {planned}.")
