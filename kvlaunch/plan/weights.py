"""Bytes of a model's weights on each rank, by the way tensor and pipeline parallelism split them."""

from __future__ import annotations

from kvlaunch.plan.facts import Architecture, ModelFacts
from kvlaunch.plan.topology import LayerRange, Topology

VOCAB_PADDING = 64
"""vLLM rounds the vocabulary up to a multiple of it (DEFAULT_VOCAB_PADDING_SIZE in vocab_parallel_embedding.py)."""


def padded_vocab(vocab_size: int) -> int:
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def layer_params(facts: ModelFacts, topology: Topology, layer: int) -> int:
    """Parameters of one decoder layer on one rank. Norms and routers are replicated on every tensor-parallel rank."""
    known = facts.known or Architecture()
    tp = topology.tp_size
    hidden, head_dim = facts.hidden_size, facts.head_dim
    q = facts.num_heads // tp * head_dim
    kv = topology.kv_heads_per_rank(facts.num_kv_heads) * head_dim
    attention = hidden * (q + 2 * kv) + q * hidden
    if known.qkv_bias:
        attention += q + 2 * kv
    norms = known.norms_per_layer * hidden + (2 * head_dim if known.qk_norm else 0)
    return attention + norms + _mlp_params(facts, known, tp, layer)


def total_params(facts: ModelFacts) -> int:
    """Parameters of the whole model, with the vocabulary unpadded and tied embeddings counted once."""
    layers = sum(layer_params(facts, Topology(1, 1), layer) for layer in range(facts.num_layers))
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    return layers + embeddings + facts.hidden_size


def weight_bytes(facts: ModelFacts, topology: Topology, split: tuple[LayerRange, ...]) -> tuple[int, ...]:
    """Bytes of the weights on each rank of a stage, by pp_rank: embeddings first, final norm and output head last.

    A tied output head shares the embeddings where both are on one stage, else the last stage holds a copy.
    """
    shared = {kind: layer_params(facts, topology, kind) for kind in _layer_kinds(facts)}
    embedding = padded_vocab(facts.vocab_size) // topology.tp_size * facts.hidden_size
    last_pp_rank = topology.pp_size - 1
    stages = []
    for pp_rank, (first, last) in enumerate(split):
        params = sum(shared[_kind_of(facts, layer)] for layer in range(first, last + 1))
        if pp_rank == 0:
            params += embedding
        if pp_rank == last_pp_rank:
            params += facts.hidden_size
            if not (facts.tie_word_embeddings and pp_rank == 0):
                params += embedding
        stages.append(params * facts.dtype_bytes)
    return tuple(stages)


def _mlp_params(facts: ModelFacts, known: Architecture, tp: int, layer: int) -> int:
    """Gate, up and down projections: three matrices for a plain MLP and for each expert."""
    hidden = facts.hidden_size
    if not facts.num_experts or layer in facts.dense_layers:
        return 3 * hidden * (facts.intermediate_size // tp)
    params = facts.num_experts * 3 * hidden * (facts.moe_intermediate_size // tp)
    params += facts.num_experts * hidden
    if known.shared_expert:
        params += 3 * hidden * (facts.shared_expert_intermediate_size // tp) + hidden
    return params


def _layer_kinds(facts: ModelFacts) -> set[int]:
    """One layer of each kind: those of a kind have the same size."""
    return {_kind_of(facts, layer) for layer in range(facts.num_layers)}


def _kind_of(facts: ModelFacts, layer: int) -> int:
    if not facts.dense_layers:
        return 0
    dense = layer in facts.dense_layers
    return next(i for i in range(facts.num_layers) if (i in facts.dense_layers) == dense)
