"""Tiny models with sliding-window and full attention together, with fixed-seed random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kvlaunch.plan.tiny import make_tiny

SLIDING_WINDOW = 64
"""Tokens."""

_LAYER_TYPES = (["sliding_attention"] * 3 + ["full_attention"]) * 2

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": len(_LAYER_TYPES),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": _LAYER_TYPES,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def make_hybrid(directory: Path) -> Path:
    """Gemma 3's architecture: several KV cache groups in one pool of vLLM."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    network = Gemma3ForCausalLM(Gemma3TextConfig(**_COMMON, query_pre_attn_scalar=32, initializer_range=0.4))
    with torch.no_grad():
        # The output head is the embeddings: where they outweigh what the layers add, the last token repeats for ever.
        network.model.embed_tokens.weight *= 0.1
        for layer in network.model.layers:  # sharp attention: one wrong block of the cache changes the output
            layer.self_attn.q_norm.weight += 8.0
            layer.post_feedforward_layernorm.weight += 1.0
    return _save(network, directory)


def make_mellum(directory: Path) -> Path:
    """Mellum's architecture without experts: two pools of SGLang."""
    import torch
    from transformers import MellumConfig, MellumForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}  # of no layer
    dense = ["dense"] * len(_LAYER_TYPES)
    network = MellumForCausalLM(MellumConfig(**_COMMON, **experts, mlp_layer_types=dense, initializer_range=0.2))
    with torch.no_grad():
        for layer in network.model.layers:  # sharp attention: one wrong slot of the cache changes the output
            layer.self_attn.q_norm.weight *= 8.0
    return _save(network, directory)


def _save(network: Any, directory: Path) -> Path:
    """In `directory`/hybrid, with the tiny model's tokenizer."""
    import torch

    tiny, model = directory / "tiny", directory / "hybrid"
    make_tiny(tiny)
    network.to(torch.bfloat16).save_pretrained(model)
    for file in tiny.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, model)
    return model
