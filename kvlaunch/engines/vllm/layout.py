"""vLLM's layout of the KV cache, as far as a plan needs it."""

from __future__ import annotations

from typing import Literal

from kvlaunch.plan.facts import ModelFacts
from kvlaunch.plan.topology import LayerRange

_SMALL_TOKEN = 1024
"""Bytes of a token in one layer of a rank, below which blocks are kept small."""


def default_block_size(device: Literal["cpu", "cuda"], token_bytes: int) -> int:
    """Tokens in a block where the user does not say.

    On CUDA vLLM's default, 16. Its CPU kernels want multiples of 32 (check_and_update_config in
    vllm/platforms/cpu.py); its default there, 128, makes the pages of a small model needlessly large.
    """
    if device == "cuda":
        return 16
    return 32 if token_bytes < _SMALL_TOKEN else 128


def why_block_size(device: Literal["cpu", "cuda"]) -> str:
    if device == "cuda":
        return "vLLM's default on CUDA"
    return (
        "vLLM's CPU kernels want multiples of 32 tokens; 128 is its default, 32 keeps the pages of small models small"
    )


def is_hybrid(facts: ModelFacts) -> bool:
    """Layers with a sliding window and layers with full attention together."""
    return 0 < len(facts.sliding_layers) < facts.num_layers


def layers_per_block(facts: ModelFacts, split: tuple[LayerRange, ...], *, hybrid: bool) -> tuple[int, ...]:
    """Layers that one block id covers on a rank of each stage.

    All of the stage's layers share their block ids where they attend alike. Where sliding and full attention are
    mixed, vLLM makes groups of equal size, each with block ids of its own, that share the memory (the rule is that of
    _get_kv_cache_groups_uniform_page_size in vllm/v1/core/kv_cache_utils.py: the size of the rarer kind, or of the
    more frequent kind where that is less than 1.5 times as large); a stage needs room for its largest group.
    """
    if not hybrid or not is_hybrid(facts):
        return tuple(last - first + 1 for first, last in split)
    sliding = sorted(facts.sliding_layers)
    full = [layer for layer in range(facts.num_layers) if layer not in facts.sliding_layers]
    smaller, larger = sorted((len(sliding), len(full)))
    size = larger if larger < 1.5 * smaller else smaller
    groups = []
    for layers in (full, sliding):
        count = -(-len(layers) // size)
        groups += [layers[i::count] for i in range(count)]
    return tuple(max(sum(1 for layer in group if first <= layer <= last) for group in groups) for first, last in split)
