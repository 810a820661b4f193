from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlaunch.config.schema import ModelConfig
from kvlaunch.errors import PlanError
from kvlaunch.plan.facts import ModelFacts, elastic_problem, load_facts
from kvlaunch.plan.fit import check_pp, check_tp, tp_problem
from kvlaunch.plan.topology import Topology, even_layers
from kvlaunch.plan.weights import layer_params, padded_vocab, total_params, weight_bytes

QWEN3_8B = ModelFacts(
    name="Qwen3-8B",
    architecture="Qwen3ForCausalLM",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_context=40960,
)
QWEN3_06B = replace(
    QWEN3_8B,
    name="Qwen3-0.6B",
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    tie_word_embeddings=True,
)
LLAMA_8B = replace(
    QWEN3_8B,
    name="Llama-3.1-8B",
    architecture="LlamaForCausalLM",
    num_layers=32,
    intermediate_size=14336,
    vocab_size=128256,
)
QWEN3_30B = replace(
    QWEN3_8B,
    name="Qwen3-30B-A3B",
    architecture="Qwen3MoeForCausalLM",
    num_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    num_kv_heads=4,
    num_experts=128,
    moe_intermediate_size=768,
)

CONFIG_JSON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "torch_dtype": "float16",
}


def write_config(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in (CONFIG_JSON | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("facts", "published"),
    [(QWEN3_8B, 8.19e9), (QWEN3_06B, 0.596e9), (LLAMA_8B, 8.03e9), (QWEN3_30B, 30.53e9)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameters_are_those_published(facts: ModelFacts, published: float) -> None:
    assert total_params(facts) == pytest.approx(published, rel=0.001)


def test_non_embedding_parameters_are_those_published() -> None:
    assert total_params(QWEN3_8B) - 2 * 151936 * 4096 == pytest.approx(6.95e9, rel=0.001)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (4, 3), (8, 4)])
@pytest.mark.parametrize("facts", [QWEN3_8B, QWEN3_06B, QWEN3_30B], ids=lambda facts: facts.name)
def test_ranks_together_hold_the_model_and_what_is_replicated(facts: ModelFacts, tp: int, pp: int) -> None:
    topology, whole = Topology(tp, pp), Topology(1, 1)
    per_stage = weight_bytes(facts, topology, even_layers(facts.num_layers, pp))
    held = sum(tp * stage for stage in per_stage) // facts.dtype_bytes
    replicated = 0
    for layer in range(facts.num_layers):
        replicated += tp * layer_params(facts, topology, layer) - layer_params(facts, whole, layer)
    replicated += (tp - 1) * facts.hidden_size
    if facts.tie_word_embeddings and pp > 1:
        replicated += facts.vocab_size * facts.hidden_size
    assert held == total_params(facts) + replicated
    # What is replicated within a stage is small: norms and routers, and KV heads only beyond their number.
    extra_heads = max(0, tp - facts.num_kv_heads) * 2 * facts.head_dim * facts.hidden_size * facts.num_layers
    per_layer = (4 * facts.hidden_size + 2 * facts.head_dim) + facts.num_experts * facts.hidden_size
    copy = facts.vocab_size * facts.hidden_size if facts.tie_word_embeddings and pp > 1 else 0
    assert replicated - copy <= (tp - 1) * facts.num_layers * per_layer + extra_heads


def test_embeddings_lie_on_the_first_stage_and_the_head_on_the_last() -> None:
    first, middle, last = weight_bytes(QWEN3_8B, Topology(1, 3), even_layers(36, 3))
    table = 2 * 151936 * 4096
    assert (first - middle, last - middle) == (table, table + 2 * 4096)


def test_tied_embeddings_are_shared_on_one_stage_and_copied_on_two() -> None:
    (alone,) = weight_bytes(QWEN3_06B, Topology(1, 1), even_layers(28, 1))
    assert alone == 2 * total_params(QWEN3_06B)
    assert sum(weight_bytes(QWEN3_06B, Topology(1, 2), even_layers(28, 2))) == alone + 2 * 151936 * 1024


def test_the_vocabulary_is_padded() -> None:
    assert [padded_vocab(size) for size in (1, 64, 65, 151936)] == [64, 64, 128, 151936]


def test_more_ranks_than_kv_heads_replicate_them() -> None:
    facts = replace(QWEN3_8B, num_kv_heads=4)
    assert tp_problem(facts, 8) is None
    at_four, at_eight = layer_params(facts, Topology(4, 1), 0), layer_params(facts, Topology(8, 1), 0)
    one_head = 2 * 128 * 4096
    replicated = 2 * 4096 + 2 * 128
    assert at_eight - replicated - one_head == (at_four - replicated - one_head) // 2


@pytest.mark.parametrize(
    ("facts", "tp", "message"),
    [
        (QWEN3_8B, 3, "tp=3 does not divide num_key_value_heads=8 (Qwen3-8B); use tp=1, 2, 4 or 8"),
        (QWEN3_8B, 64, "tp=64 does not divide num_attention_heads=32 (Qwen3-8B); use tp=1, 2, 4, 8, 16 or 32"),
        (QWEN3_8B, 12, "tp=12 is above num_key_value_heads=8 and no multiple of it"),
        (replace(QWEN3_8B, intermediate_size=12290), 4, "tp=4 does not divide intermediate_size=12290"),
        (replace(QWEN3_30B, moe_intermediate_size=770), 4, "tp=4 does not divide moe_intermediate_size=770"),
        (replace(QWEN3_8B, num_kv_heads=1, num_heads=3, intermediate_size=3), 3, "vocab_size=151936"),
    ],
)
def test_a_tp_that_does_not_fit_names_both_values(facts: ModelFacts, tp: int, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_tp(facts, tp)
    assert message in caught.value.message


def test_more_stages_than_layers_are_refused() -> None:
    check_pp(QWEN3_8B, 36)
    with pytest.raises(PlanError, match=r"pp=37 is more than num_hidden_layers=36 \(Qwen3-8B\)"):
        check_pp(QWEN3_8B, 37)


def test_a_local_folder_gives_the_numbers(tmp_path: Path) -> None:
    facts = load_facts(ModelConfig(name="mine", path=write_config(tmp_path / "a b'é")), environ={})
    assert (facts.name, facts.num_layers, facts.dtype, facts.tie_word_embeddings) == ("mine", 28, "float16", True)
    assert total_params(facts) == total_params(QWEN3_06B)


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_the_hugging_face_cache_gives_the_numbers(tmp_path: Path, variable: str) -> None:
    hub = {"HF_HOME": "hub", "HF_HUB_CACHE": "", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    repo = tmp_path / hub / "models--Qwen--Qwen3-0.6B"
    write_config(repo / "snapshots" / "old", num_hidden_layers=1)
    write_config(repo / "snapshots" / "new")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("new")
    assert load_facts(ModelConfig(name="Qwen/Qwen3-0.6B"), environ={variable: str(tmp_path)}).num_layers == 28
    (repo / "refs" / "main").write_text("old")
    assert load_facts(ModelConfig(name="Qwen/Qwen3-0.6B"), environ={variable: str(tmp_path)}).num_layers == 1


def test_an_unknown_model_says_which_numbers_to_give(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load_facts(ModelConfig(name="no/such", num_layers=2), environ={"HF_HOME": str(tmp_path)})
    assert "no/such" in caught.value.message
    assert caught.value.hint is not None
    assert "model.hidden_size=" in caught.value.hint
    assert "model.num_layers" not in caught.value.hint


def test_numbers_of_the_config_win_over_config_json(tmp_path: Path) -> None:
    path = write_config(tmp_path / "m")
    facts = load_facts(ModelConfig(name="m", path=path, num_layers=4, dtype="float32"), environ={})
    assert (facts.num_layers, facts.dtype, facts.tie_word_embeddings) == (4, "float32", True)


def test_what_config_json_leaves_out_is_derived(tmp_path: Path) -> None:
    path = write_config(tmp_path / "m", head_dim=..., num_key_value_heads=..., torch_dtype="float32")
    facts = load_facts(ModelConfig(name="m", path=path), environ={})
    assert (facts.head_dim, facts.num_kv_heads, facts.dtype) == (64, 16, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"mamba_d_state": 16}, "state-space"),
        ({"linear_num_value_heads": 32}, "linear-attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"num_key_value_heads": 7}, "num_key_value_heads=7"),
        ({"num_experts": 4}, "moe_intermediate_size"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(PlanError) as caught:
        load_facts(ModelConfig(name="m", path=write_config(tmp_path / "m", **changes)), environ={})
    assert word in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_broken_config_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(PlanError, match=r"config\.json"):
        load_facts(ModelConfig(name="m", path=str(tmp_path)), environ={})


@pytest.mark.parametrize(
    ("changes", "sliding"),
    [
        ({}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"layer_types": ["full_attention", "sliding_attention"] * 14}, 14),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512}, 24),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 512}, 14),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 28),
    ],
)
def test_sliding_layers(tmp_path: Path, changes: dict[str, Any], sliding: int) -> None:
    facts = load_facts(ModelConfig(name="m", path=write_config(tmp_path / "m", **changes)), environ={})
    assert len(facts.sliding_layers) == sliding


def test_mixture_of_experts_from_config_json(tmp_path: Path) -> None:
    path = write_config(
        tmp_path / "m",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=8,
        moe_intermediate_size=64,
        mlp_only_layers=[1],
        decoder_sparse_step=2,
    )
    facts = load_facts(ModelConfig(name="m", path=path), environ={})
    assert 1 in facts.dense_layers
    assert 3 not in facts.dense_layers
    assert 2 in facts.dense_layers
    mellum = write_config(
        tmp_path / "y",
        architectures=["MellumForCausalLM"],
        num_local_experts=8,
        moe_intermediate_size=64,
        mlp_layer_types=["dense", "sparse"] * 14,
    )
    assert load_facts(ModelConfig(name="y", path=mellum), environ={}).dense_layers == frozenset(range(0, 28, 2))
    mixtral = write_config(tmp_path / "x", architectures=["MixtralForCausalLM"], num_local_experts=8)
    assert load_facts(ModelConfig(name="x", path=mixtral), environ={}).moe_intermediate_size == 3072


def test_only_known_architectures_are_elastic() -> None:
    assert elastic_problem(QWEN3_8B) is None
    problem = elastic_problem(replace(QWEN3_8B, architecture="NewForCausalLM"))
    assert problem is not None
    assert "NewForCausalLM" in problem
