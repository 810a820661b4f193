"""What is particular to vLLM in a plan, and the page arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlaunch.config.schema import KVConfig, KVModeName
from kvlaunch.engines.options import render
from kvlaunch.engines.vllm.layout import layers_per_block
from kvlaunch.errors import PlanError
from kvlaunch.launch import listeners
from kvlaunch.plan.facts import ModelFacts
from kvlaunch.plan.host import HostFacts
from kvlaunch.plan.kv import MOST_RANGES, KVShape, blocks_per_page, plan_kv
from kvlaunch.plan.planner import make_plan
from kvlaunch.plan.topology import even_layers
from tests.unit.test_plan import HOST, config, options, plan, qwen3_8b, tiny


@given(
    block_bytes=st.integers(1, 2**20),
    granularity=st.sampled_from([4096, 2**21]),
    least=st.integers(0, 2**22),
)
def test_a_page_is_the_smallest_that_aligns(block_bytes: int, granularity: int, least: int) -> None:
    count = blocks_per_page(block_bytes, granularity, least)
    assert (count * block_bytes) % granularity == 0
    assert count * block_bytes >= least
    smaller = [k for k in range(max(1, count - 64), count) if (k * block_bytes) % granularity == 0]
    assert not [k for k in smaller if k * block_bytes >= least]


@given(
    block_size=st.sampled_from([16, 32, 128]),
    token_bytes=st.integers(1, 4096),
    layers=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    reserve=st.integers(2**20, 2**40),
)
def test_blocks_fill_whole_pages_within_the_reserve(
    block_size: int, token_bytes: int, layers: list[int], reserve: int
) -> None:
    shape = KVShape(block_size=block_size, block_bytes=block_size * token_bytes, stage_layers=tuple(layers))
    smallest = blocks_per_page(shape.block_bytes, 4096, 0)
    page = smallest * shape.block_bytes * max(layers)
    wanted = KVConfig(mode=KVModeName.elastic, reserve=reserve)
    if reserve < 2 * page:
        with pytest.raises(PlanError, match=f"kv.reserve={reserve} holds {reserve // page} pages"):
            plan_kv(wanted, shape, "cpu")
        return
    kv = plan_kv(wanted, shape, "cpu")
    ranges = kv.num_blocks // kv.blocks_per_page * max(layers)
    assert ranges <= MOST_RANGES
    assert kv.blocks_per_page == smallest or ranges > MOST_RANGES // 4
    assert kv.blocks_per_page % smallest == 0
    assert kv.num_blocks % kv.blocks_per_page == 0
    assert kv.reserve_bytes == kv.num_blocks * shape.block_bytes * max(layers)
    assert reserve - kv.blocks_per_page // smallest * page < kv.reserve_bytes <= reserve


def test_a_larger_page_is_made_on_demand() -> None:
    kv = plan(tp=2, pp=2, kv={"page": 10_000}).kv
    assert kv.blocks_per_page == 3


@pytest.mark.parametrize(
    ("device", "model", "tp", "block_size"),
    [("cpu", tiny(), 1, 32), ("cpu", qwen3_8b(), 1, 128), ("cpu", qwen3_8b(), 8, 32), ("cuda", qwen3_8b(), 2, 16)],
)
def test_default_block_sizes(device: str, model: Any, tp: int, block_size: int) -> None:
    made = plan(model, device=device, tp=tp)
    assert made.kv.block_size == block_size
    assert options(made)["--block-size"] == str(block_size)
    assert plan(model, device=device, tp=tp, kv={"block_size": 64}).kv.block_size == 64


def test_bytes_of_qwen3_8b_on_gpus() -> None:
    made = plan(qwen3_8b(), device="cuda", tp=2, pp=2)
    rank = made.ranks[0]
    assert rank.kv_bytes_per_token == 2 * 4 * 128 * 2 * 18
    assert rank.kv_bytes_per_block == 16 * rank.kv_bytes_per_token
    assert made.kv.granularity == 2**21
    assert made.kv.blocks_per_page * 16 * 2 * 4 * 128 * 2 == 2**21


def test_an_uneven_split_reserves_for_the_largest_rank() -> None:
    made = plan(tiny(num_layers=5), pp=2)
    assert [rank.layers for rank in made.ranks] == [(0, 2), (3, 4)]
    assert made.kv.reserve_bytes == made.kv.num_blocks * made.ranks[0].kv_bytes_per_block


def test_a_given_split_is_honoured() -> None:
    made = plan(pp=2, env={"VLLM_PP_LAYER_PARTITION": "1,3"})
    assert [rank.layers for rank in made.ranks] == [(0, 0), (1, 3)]
    assert made.nodes[0].env["VLLM_PP_LAYER_PARTITION"] == "1,3"
    assert "VLLM_PP_LAYER_PARTITION" not in made.nodes[0].unset
    assert "VLLM_PP_LAYER_PARTITION" in plan(pp=2).nodes[0].unset


@pytest.mark.parametrize("given_split", ["4", "1,2", "0,4", "a,4", "1,1,2", ""])
def test_a_split_that_is_none_is_refused(given_split: str) -> None:
    with pytest.raises(PlanError, match=r"VLLM_PP_LAYER_PARTITION=.* pp=2 .* num_hidden_layers=4"):
        plan(pp=2, env={"VLLM_PP_LAYER_PARTITION": given_split})


def test_fp8_halves_the_kv_cache() -> None:
    full, half = plan(), plan(args={"kv_cache_dtype": "fp8"})
    assert 2 * half.ranks[0].kv_bytes_per_token == full.ranks[0].kv_bytes_per_token
    with pytest.raises(PlanError, match="kv_cache_dtype=nvfp4"):
        plan(args={"kv_cache_dtype": "nvfp4"})


@pytest.mark.parametrize(
    ("args", "instead"),
    [
        ({"tensor_parallel_size": 2}, "tp=..."),
        ({"pipeline-parallel-size": 2}, "pp=..."),
        ({"port": 1}, "server.port=..."),
        ({"--model": "x"}, "model=..."),
        ({"num_gpu_blocks_override": 8}, "kv.reserve=..."),
        ({"block_size": 16}, "kv.block_size=..."),
    ],
)
def test_options_of_kvlaunch_are_named(args: dict[str, Any], instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(args=args, mode="static")
    assert caught.value.hint is not None
    assert instead in caught.value.hint


@pytest.mark.parametrize(
    "args",
    [
        {"kv_transfer_config": {"kv_connector": "X"}},
        {"kv_offloading_size": 1},
        {"decode_context_parallel_size": 2},
        {"prefill-context-parallel-size": 2},
        {"enable_sleep_mode": True},
        {"speculative_config": {"method": "ngram"}},
        {"kv_sharing_fast_prefill": True},
        {"attention_config": {"hisparse_config": {"top_k": 1}}},
    ],
)
def test_what_elastic_cannot_do_is_refused_by_name_and_static_takes_it(args: dict[str, Any]) -> None:
    (name,) = args
    with pytest.raises(PlanError, match=rf"{name.replace('-', '_')}.* does not work with kv=elastic yet"):
        plan(args=args)
    assert f"--{name.replace('_', '-')}" in plan(args=args, mode="static").nodes[0].argv


@pytest.mark.parametrize(
    "args", [{"data_parallel_size": 2}, {"headless": True}, {"distributed_executor_backend": "ray"}]
)
@pytest.mark.parametrize("mode", ["elastic", "static"])
def test_what_no_run_can_do_is_refused(args: dict[str, Any], mode: str) -> None:
    with pytest.raises(PlanError, match=next(iter(args))):
        plan(args=args, mode=mode)


def test_refused_options_that_are_off_pass() -> None:
    off = {"enable_sleep_mode": False, "data_parallel_size": 1, "kv_transfer_config": None}
    assert "--no-enable-sleep-mode" in plan(args=off).nodes[0].argv


@pytest.mark.parametrize("option", ["enforce_eager", "enable_lora"])
def test_a_skipped_warm_up_is_refused_where_stages_need_it(option: str) -> None:
    with pytest.raises(PlanError, match=option):
        plan(pp=2, args={option: True})
    plan(pp=1, args={option: True})


def test_options_as_the_command_line_wants_them() -> None:
    given_options = {"a_b": 1, "flag": True, "off": False, "none": None, "j": {"k": [1]}, "many": ["x", 2], "f": 0.5}
    assert render(given_options, negate=True) == [
        *("--a-b", "1", "--flag", "--no-off", "--j", '{"k": [1]}', "--many", "x", "2", "--f", "0.5"),
    ]


def test_the_users_compilation_replaces_the_default() -> None:
    argv = plan(args={"compilation_config": {"mode": 3}}).nodes[0].argv
    assert argv.count("--compilation-config") == 1
    assert '{"mode": 3}' in argv


def test_engine_env_adds_replaces_and_removes() -> None:
    node = plan(tp=2, pp=2, env={"OMP_NUM_THREADS": "7", "MINE": "1", "DO_NOT_TRACK": None}).nodes[0]
    assert (node.env["OMP_NUM_THREADS"], node.env["MINE"]) == ("7", "1")
    assert "DO_NOT_TRACK" not in node.env
    assert "DO_NOT_TRACK" in node.unset


def test_two_hosts() -> None:
    wanted = config(tp=2, pp=2, nnodes=2)
    wanted.rdzv.endpoint = "a:1"
    made = make_plan(wanted, run="r", host=HOST)
    assert [(rank.node_rank, rank.pp_rank, rank.local_rank) for rank in made.ranks] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert [(stage.node_rank, stage.network) for stage in made.stages] == [(0, True), (1, True)]
    for node in made.nodes:
        argv = list(node.argv)
        assert argv[argv.index("--node-rank") + 1] == str(node.node_rank)
        assert argv[argv.index("--master-addr") + 1] == "${MASTER_ADDR}"
        assert argv[argv.index("--master-port") + 1] == "${MASTER_PORT}"
        assert ("--headless" in argv) == (node.node_rank > 0)
        assert (node.env["VLLM_HOST_IP"], node.env["GLOO_SOCKET_IFNAME"]) == ("${LOCAL_ADDR}", "${LOCAL_INTERFACE}")
        assert "KVLAUNCH_SECRET" in node.unset


@pytest.mark.parametrize("mode", KVModeName)
def test_a_stage_larger_than_a_host_lies_on_several(mode: KVModeName) -> None:
    wanted = config(tp=2, nnodes=2)
    wanted.rdzv.endpoint = "a:1"
    wanted.kv.mode = mode
    plan = make_plan(wanted, run="r", host=HOST)
    assert [node.ranks for node in plan.nodes] == [(0,), (1,)]
    assert [(stage.leader, stage.node_rank, stage.ranks) for stage in plan.stages] == [(0, 0, (0, 1))]
    assert listeners.roles(plan) == {"stage 0": 0, "rank 1": 1}


def test_an_unknown_architecture_is_static_only() -> None:
    model = tiny(architecture="NewForCausalLM")
    with pytest.raises(PlanError, match="NewForCausalLM"):
        plan(model)
    assert any(note.value == "NewForCausalLM" for note in plan(model, mode="static").notes)


def hybrid(num_layers: int, sliding: set[int]) -> ModelFacts:
    return ModelFacts(
        name="m",
        architecture="Gemma3ForCausalLM",
        num_layers=num_layers,
        hidden_size=128,
        intermediate_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=512,
        sliding_layers=frozenset(sliding),
    )


@pytest.mark.parametrize(
    ("num_layers", "sliding", "pp", "expected"),
    [
        # One full layer in six: five groups of sliding layers beside one of full layers, four layers in each.
        (24, {i for i in range(24) if (i + 1) % 6}, 1, (4,)),
        (24, {i for i in range(24) if (i + 1) % 6}, 2, (2, 2)),
        # Nearly as many of both: two groups, the larger one sets the size.
        (5, {0, 2, 4}, 1, (2,)),
        (25, set(range(0, 25, 2)), 1, (13,)),
        (4, set(), 2, (2, 2)),
        (4, {0, 1, 2, 3}, 2, (2, 2)),
    ],
)
def test_layers_of_a_block_where_sliding_and_full_attention_mix(
    num_layers: int, sliding: set[int], pp: int, expected: tuple[int, ...]
) -> None:
    facts, split = hybrid(num_layers, sliding), even_layers(num_layers, pp)
    assert layers_per_block(facts, split, hybrid=True) == expected
    assert sum(layers_per_block(facts, split, hybrid=False)) == num_layers


def test_one_cpu_thread_is_the_least() -> None:
    host = HostFacts(cpus=2, numa_nodes=1, memory_bytes=2**34, gpus=0, python="p", version="0")
    assert plan(tp=2, pp=2, host=host).nodes[0].env["OMP_NUM_THREADS"] == "1"
