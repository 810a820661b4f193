"""A tiny model with sliding-window and full attention together: several KV cache groups in one pool."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvlaunch.plan.tiny import make_tiny

SLIDING_WINDOW = 64
"""Tokens."""


def make_hybrid(directory: Path) -> Path:
    """Gemma 3's architecture with fixed-seed random weights, and the tiny model's tokenizer."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tiny = directory / "tiny"
    make_tiny(tiny)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=SLIDING_WINDOW,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        max_position_embeddings=2048,
        initializer_range=0.4,
        dtype="bfloat16",
    )
    network = Gemma3ForCausalLM(config)
    with torch.no_grad():
        # The output head is the embeddings: where they outweigh what the layers add, the last token repeats for ever.
        network.model.embed_tokens.weight *= 0.1
        for layer in network.model.layers:  # sharp attention: one wrong block of the cache changes the output
            layer.self_attn.q_norm.weight += 8.0
            layer.post_feedforward_layernorm.weight += 1.0
    model = directory / "hybrid"
    network.to(torch.bfloat16).save_pretrained(model)
    for file in tiny.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, model)
    return model
