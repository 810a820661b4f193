"""What is particular to SGLang in a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlaunch.config.schema import ModelConfig
from kvlaunch.errors import PlanError
from kvlaunch.plan.kv import MOST_RANGES
from kvlaunch.plan.types import LaunchPlan
from tests.unit.test_plan import HOST, config, make_plan, noted, options, plan, qwen3_8b, tiny

MIB = 2**20


def sglang(model: Any = None, **changes: Any) -> LaunchPlan:
    return plan(model, engine="sglang", **changes)


def test_tp2_pp2_on_cpu() -> None:
    made = sglang(tp=2, pp=2, kv={"reserve": 64 * MIB})
    assert made.engine == "sglang"
    assert [(r.global_rank, r.pp_rank, r.tp_rank, r.layers) for r in made.ranks] == [
        (0, 0, 0, (0, 1)),
        (1, 0, 1, (0, 1)),
        (2, 1, 0, (2, 3)),
        (3, 1, 1, (2, 3)),
    ]
    # One KV head of 32 elements of 2 bytes: 64 tokens of keys (and as many of values) are a small page of memory.
    assert (made.kv.block_size, made.kv.blocks_per_page) == (1, 64)
    assert [r.kv_bytes_per_token for r in made.ranks] == [2 * 2 * 64] * 4
    assert made.nodes[0].argv[:3] == (HOST.python, "-m", "kvlaunch.engines.sglang.serve")
    got = options(made)
    assert (
        got.items()
        >= {
            "--tp-size": "2",
            "--pp-size": "2",
            "--device": "cpu",
            "--page-size": "1",
            "--max-total-tokens": str(made.kv.num_blocks - 1),
            "--attention-backend": "torch_native",
            "--sleep-on-idle": "",
        }.items()
    )
    env = made.nodes[0].env
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0-1|2-3|4-5|6-7"
    assert env["SGLANG_NCCL_SO_PATH"].startswith("/nonexistent/")
    assert env["SGLANG_PLUGINS"] == "kvlaunch"
    assert noted(made)["engine.args.attention_backend"] == "torch_native"


def test_keys_and_values_lie_apart() -> None:
    """Half of a block's bytes must be a multiple of the granularity, not only all of them."""
    made = sglang(tiny(num_kv_heads=2, head_dim=24), kv={"reserve": 64 * MIB})
    strip = made.kv.blocks_per_page * made.ranks[0].kv_bytes_per_token // 2 // 4
    assert strip % made.kv.granularity == 0
    assert made.kv.num_blocks % made.kv.blocks_per_page == 0


@pytest.mark.parametrize(
    ("layers", "pp", "ranges"),
    [(36, 1, [(0, 35)]), (7, 3, [(0, 1), (2, 3), (4, 6)]), (8, 3, [(0, 1), (2, 4), (5, 7)])],
)
def test_the_last_stages_get_what_is_left_over(layers: int, pp: int, ranges: list[tuple[int, int]]) -> None:
    assert [r.layers for r in sglang(tiny(num_layers=layers), pp=pp).ranks] == ranges


def test_a_split_of_the_users_own() -> None:
    name = "SGLANG_PP_LAYER_PARTITION"
    assert [r.layers for r in sglang(pp=2, env={name: "1,3"}).ranks] == [(0, 0), (1, 3)]
    with pytest.raises(PlanError, match=name):
        sglang(pp=2, env={name: "1,2"})


def test_a_larger_page_size_makes_larger_blocks() -> None:
    made = sglang(tp=2, kv={"reserve": 64 * MIB, "block_size": 16})
    assert options(made)["--page-size"] == "16"
    assert made.kv.blocks_per_page == 4
    assert options(made)["--max-total-tokens"] == str((made.kv.num_blocks - 1) * 16)


def test_the_pages_of_a_large_model_cannot_exceed_what_a_process_may_map() -> None:
    kv = sglang(qwen3_8b(), tp=2, kv={"reserve": 32 * 2**30}).kv
    assert kv.num_blocks // kv.blocks_per_page * 36 * 2 <= MOST_RANGES
    small = sglang(qwen3_8b(), tp=2, kv={"reserve": 32 * 2**30, "page": 8192}).kv
    assert small.blocks_per_page == 4


@pytest.mark.parametrize(
    ("args", "instead"),
    [
        ({"tp_size": 2}, "tp=..."),
        ({"--model-path": "x"}, "model=..."),
        ({"page-size": 16}, "kv.block_size=..."),
        ({"max_total_tokens": 1}, "kv.reserve=..."),
        ({"device": "cpu"}, "device=..."),
    ],
)
def test_options_of_kvlaunch_are_named(args: dict[str, Any], instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        sglang(args=args, mode="static")
    assert caught.value.hint is not None
    assert instead in caught.value.hint


@pytest.mark.parametrize(
    "args",
    [
        {"disaggregation_mode": "prefill"},
        {"enable_hierarchical_cache": True},
        {"speculative_algorithm": "EAGLE"},
        {"enable-memory-saver": True},
        {"dcp_size": 2},
        {"swa_full_tokens_ratio": 0.5},
    ],
)
def test_what_elastic_cannot_do_is_refused_by_name_and_static_takes_it(args: dict[str, Any]) -> None:
    (name,) = args
    with pytest.raises(PlanError, match=rf"{name.replace('-', '_')}.* does not work with kv=elastic yet"):
        sglang(args=args)
    assert f"--{name.replace('_', '-')}" in sglang(args=args, mode="static").nodes[0].argv


def test_data_parallelism_is_refused() -> None:
    with pytest.raises(PlanError, match="data parallelism"):
        sglang(args={"dp_size": 2})
    assert "--dp-size" in sglang(args={"dp_size": 1}).nodes[0].argv


def test_a_flag_that_is_off_is_left_out() -> None:
    assert not any("radix" in word for word in sglang(args={"disable_radix_cache": False}).nodes[0].argv)
    assert "--disable-radix-cache" in sglang(args={"disable_radix_cache": True}).nodes[0].argv


def test_the_users_options_win() -> None:
    made = sglang(args={"attention_backend": "intel_amx"})
    assert options(made)["--attention-backend"] == "intel_amx"
    assert made.nodes[0].argv.count("--attention-backend") == 1
    assert "engine.args.attention_backend" not in noted(made)


def mellum(folder: Path, layer_types: list[str], architecture: str = "MellumForCausalLM") -> ModelConfig:
    content = {
        "architectures": [architecture],
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "sliding_window": 64,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return ModelConfig(name=str(folder))


def test_two_pools_have_the_same_blocks_and_each_layer_counts_once(tmp_path: Path) -> None:
    made = sglang(mellum(tmp_path, ["sliding_attention", "sliding_attention", "full_attention"] * 2), pp=2)
    assert [rank.kv_bytes_per_block for rank in made.ranks] == [3 * 2 * 2 * 32 * 2] * 2
    assert made.kv.reserve_bytes == made.kv.num_blocks * made.ranks[0].kv_bytes_per_block
    assert options(made)["--swa-full-tokens-ratio"] == noted(made)["engine.args.swa_full_tokens_ratio"] == "1.0"
    assert "--swa-full-tokens-ratio" not in options(sglang())


def test_a_sliding_window_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    model = mellum(tmp_path, ["sliding_attention", "full_attention"], "Gemma3ForCausalLM")
    with pytest.raises(PlanError, match=r"Gemma3ForCausalLM .*sliding window"):
        sglang(model)
    sglang(model, mode="static")


@pytest.mark.parametrize("only", ["sliding_attention", "full_attention"])
def test_a_stage_with_one_kind_of_layers_beside_others_is_refused(tmp_path: Path, only: str) -> None:
    model = mellum(tmp_path, ["sliding_attention", "full_attention", only, only])
    with pytest.raises(PlanError, match=r"Stage 1 \(layers 2-3\)"):
        sglang(model, pp=2)
    assert sglang(model, pp=2, mode="static").pp_size == 2, "what it comes to is SGLang's own business"


def test_what_is_not_there_yet() -> None:
    with pytest.raises(PlanError, match="device=cuda"):
        sglang(device="cuda")
    sglang(device="cuda", mode="static")


def test_two_hosts() -> None:
    wanted = config(engine="sglang", pp=4, nnodes=2)
    wanted.rdzv.endpoint = "a:1"
    first, second = make_plan(wanted, run="r", host=HOST).nodes
    for node in (first, second):
        argv = list(node.argv)
        assert argv[argv.index("--nnodes") + 1] == "2"
        assert argv[argv.index("--node-rank") + 1] == str(node.node_rank)
        assert argv[argv.index("--dist-init-addr") + 1] == "${MASTER}"
        assert (node.env["SGLANG_HOST_IP"], node.env["GLOO_SOCKET_IFNAME"]) == ("${LOCAL_ADDR}", "${LOCAL_INTERFACE}")
        assert node.env["SGLANG_NCCL_SO_PATH"].startswith("/nonexistent/")
        assert node.env["SGLANG_CPU_OMP_THREADS_BIND"] == "0-3|4-7"
