"""Does the model fit the topology: rules of tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from kvlaunch.errors import PlanError
from kvlaunch.plan.facts import ModelFacts
from kvlaunch.plan.weights import padded_vocab


def check_tp(facts: ModelFacts, tp_size: int) -> None:
    """Raise PlanError where tp_size cannot split the model, naming both values, the rule and what works."""
    problem = tp_problem(facts, tp_size)
    if problem is None:
        return
    limit = facts.num_kv_heads if tp_size <= facts.num_kv_heads else facts.num_heads
    working = [tp for tp in range(1, limit + 1) if tp_problem(facts, tp) is None]
    raise PlanError(f"tp={tp_size} {problem} ({facts.name}); use tp={one_of(working)}")


def check_pp(facts: ModelFacts, pp_size: int) -> None:
    """Raise PlanError where there are more stages than layers."""
    layers = facts.num_layers
    if pp_size > layers:
        raise PlanError(
            f"pp={pp_size} is more than num_hidden_layers={layers} ({facts.name}): every stage needs a layer; "
            f"use pp={layers} or less"
        )


def tp_problem(facts: ModelFacts, tp_size: int) -> str | None:
    """The rule that tp_size breaks, or None. The rules are those of vLLM's and SGLang's parallel layers."""
    kv_heads = facts.num_kv_heads
    if tp_size <= kv_heads and kv_heads % tp_size:
        return f"does not divide num_key_value_heads={kv_heads}"
    if tp_size > kv_heads and tp_size % kv_heads:
        return f"is above num_key_value_heads={kv_heads} and no multiple of it, so heads cannot be replicated evenly"
    split = {"num_attention_heads": facts.num_heads}
    if not facts.num_experts or facts.dense_layers:
        split["intermediate_size"] = facts.intermediate_size
    if facts.num_experts:
        split["moe_intermediate_size"] = facts.moe_intermediate_size
    if facts.shared_expert_intermediate_size:
        split["shared_expert_intermediate_size"] = facts.shared_expert_intermediate_size
    for name, value in split.items():
        if value % tp_size:
            return f"does not divide {name}={value}"
    vocab = padded_vocab(facts.vocab_size)
    if vocab % tp_size:
        return f"does not divide vocab_size={facts.vocab_size}, padded to {vocab}"
    return None


def one_of(values: Sequence[int]) -> str:
    """`1`, `1 or 2`, `1, 2 or 4`."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
