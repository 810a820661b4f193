from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlaunch.config.schema import (
    ClusterConfig,
    DeviceConfig,
    DeviceName,
    EngineConfig,
    EngineName,
    KVConfig,
    KVModeName,
    LaunchConfig,
    ModelConfig,
)
from kvlaunch.errors import PlanError
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.host import HostFacts, check_host, probe_host
from kvlaunch.plan.ids import new_run_id
from kvlaunch.plan.planner import make_plan
from kvlaunch.plan.tiny import tiny_model_dir
from kvlaunch.plan.types import LaunchPlan

HOST = HostFacts(cpus=8, numa_nodes=2, memory_bytes=64 * 2**30, gpus=0, python="/env/bin/python", version="0")
MIB = 2**20


def tiny(**changes: Any) -> ModelConfig:
    numbers: dict[str, Any] = {
        "name": "tiny-qwen3",
        "tiny": True,
        "architecture": "Qwen3ForCausalLM",
        "num_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "max_context": 4096,
    }
    return ModelConfig(**(numbers | changes))


def qwen3_8b(**changes: Any) -> ModelConfig:
    numbers: dict[str, Any] = {
        "name": "Qwen3-8B",
        "path": "Qwen/Qwen3-8B",
        "architecture": "Qwen3ForCausalLM",
        "num_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_context": 40960,
    }
    return ModelConfig(**(numbers | changes))


def config(
    model: ModelConfig | None = None,
    *,
    engine: str = "vllm",
    device: str = "cpu",
    mode: str = "elastic",
    kv: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    env: dict[str, str | None] | None = None,
    **root: Any,
) -> LaunchConfig:
    return LaunchConfig(
        engine=EngineConfig(name=EngineName(engine), args=args or {}, env=env or {}),
        model=model or tiny(),
        kv=KVConfig(mode=KVModeName(mode), **({"reserve": 2**31} | (kv or {}))),
        device=DeviceConfig(name=DeviceName(device)),
        cluster=ClusterConfig(name="local"),
        **root,
    )


def plan(model: ModelConfig | None = None, *, host: HostFacts = HOST, **changes: Any) -> LaunchPlan:
    return make_plan(config(model, **changes), run="r-1", host=host)


def options(plan: LaunchPlan) -> dict[str, str]:
    """argv of the first node as option -> value, `` for a bare flag."""
    argv = plan.nodes[0].argv[3:]
    pairs = zip(argv, [*argv[1:], "--"], strict=True)
    return {word: "" if after.startswith("--") else after for word, after in pairs if word.startswith("--")}


def noted(plan: LaunchPlan) -> dict[str, str]:
    return {note.setting: note.value for note in plan.notes}


def test_tp2_pp2_on_cpu() -> None:
    made = plan(tp=2, pp=2, kv={"reserve": 128 * MIB})
    assert (made.world_size, made.device, made.engine_python) == (4, "cpu", "/env/bin/python")
    assert [(r.global_rank, r.pp_rank, r.tp_rank, r.layers) for r in made.ranks] == [
        (0, 0, 0, (0, 1)),
        (1, 0, 1, (0, 1)),
        (2, 1, 0, (2, 3)),
        (3, 1, 1, (2, 3)),
    ]
    assert [(s.leader, s.ranks, s.endpoint) for s in made.stages] == [
        (0, (0, 1), f"ipc://{RunPaths.of('r-1').listener_socket(0)}"),
        (2, (2, 3), f"ipc://{RunPaths.of('r-1').listener_socket(1)}"),
    ]
    assert made.nodes[0].ranks == (0, 1, 2, 3)
    assert made.model.path == str(tiny_model_dir())
    assert made.model.make_tiny
    assert options(made) == {
        "--model": str(tiny_model_dir()),
        "--served-model-name": "tiny-qwen3",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--distributed-executor-backend": "mp",
        "--block-size": "32",
        "--num-gpu-blocks-override": str(128 * MIB // 8192),
        "--kv-cache-memory-bytes": "8192",
        "--compilation-config": '{"mode": 2, "backend": "eager"}',
    }
    assert made.nodes[0].argv[:3] == ("/env/bin/python", "-m", "kvlaunch.engines.vllm.serve")
    env = made.nodes[0].env
    assert env["VLLM_PLUGINS"] == "kvlaunch"
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == ("nobind", "2")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" in made.nodes[0].unset


def test_the_plan_survives_json() -> None:
    made = plan(tp=2, pp=2)
    assert LaunchPlan.from_json(made.to_json()) == made


def test_ranks_that_fit_the_numa_nodes_are_bound_by_vllm() -> None:
    env = plan(tp=2).nodes[0].env
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env
    assert "OMP_NUM_THREADS" not in env


def test_every_choice_is_explained() -> None:
    made = plan(tp=2, pp=2)
    assert {"kv.block_size", "kv.blocks_per_page", "engine.env.OMP_NUM_THREADS", "rdzv.endpoint"} <= noted(made).keys()
    assert all(note.why for note in made.notes)


def test_static_and_elastic_have_the_same_blocks() -> None:
    elastic, static = plan(tp=2, pp=2), plan(tp=2, pp=2, mode="static")
    assert replace_kv(static) == replace_kv(elastic)
    assert options(static)["--kv-cache-memory-bytes"] == str(static.kv.reserve_bytes)


def replace_kv(made: LaunchPlan) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(made.to_json())["kv"]
    return {key: value for key, value in content.items() if key != "mode"}


def test_a_plan_for_gpus_needs_none_here() -> None:
    made = plan(qwen3_8b(), device="cuda", tp=2, pp=2)
    assert [rank.device for rank in made.ranks] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert "--compilation-config" not in options(made)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in made.nodes[0].env
    assert "HF_HUB_OFFLINE" not in made.nodes[0].env
    assert any("another machine" in note.why for note in made.notes)
    with pytest.raises(PlanError, match="needs 4 GPUs on this node, one a rank, and sees 0"):
        check_host(made, HOST)
    check_host(made, replace(HOST, gpus=4))


@pytest.mark.parametrize(
    ("visible", "gpus", "device"),
    [(None, 0, "cpu"), (None, 2, "cuda"), ("", 2, "cpu"), ("0,1", 0, "cpu"), ("1,0", 2, "cuda"), ("-1", 2, "cpu")],
)
def test_device_auto_follows_what_is_visible(visible: str | None, gpus: int, device: str) -> None:
    host = replace(HOST, gpus=gpus, cuda_visible_devices=visible)
    assert plan(device="auto", tp=2, host=host).device == device


@pytest.mark.parametrize(
    ("visible", "message"),
    [("", "needs 2 GPUs on this node, one a rank, and sees 0"), ("3", "and sees 1"), ("0,-1,1", "and sees 1")],
)
def test_too_few_visible_gpus_are_counted(visible: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(device="cuda", tp=2, host=replace(HOST, cuda_visible_devices=visible))


@pytest.mark.parametrize("device", ["cuda", "auto"])
@pytest.mark.parametrize("gpus", [0, 4])
def test_a_gpu_named_twice_is_refused(device: str, gpus: int) -> None:
    with pytest.raises(PlanError, match="names device 0 twice"):
        plan(device=device, tp=2, host=replace(HOST, gpus=gpus, cuda_visible_devices="0,0"))


def test_the_cpu_engine_does_not_care_about_gpus() -> None:
    host = replace(HOST, cuda_visible_devices="0,0")
    check_host(plan(host=host), host)


def test_engine_env_decides_what_is_visible() -> None:
    host = replace(HOST, gpus=2)
    assert plan(device="auto", host=host, env={"CUDA_VISIBLE_DEVICES": ""}).device == "cpu"
    hidden = replace(host, cuda_visible_devices="")
    made = plan(device="auto", host=hidden, env={"CUDA_VISIBLE_DEVICES": None})
    assert made.device == "cuda"
    check_host(made, hidden)


@pytest.mark.parametrize(("mode", "fits"), [("elastic", True), ("static", False)])
def test_a_host_without_the_memory_is_refused(mode: str, fits: bool) -> None:
    made = plan(qwen3_8b(), mode=mode, tp=2, kv={"reserve": 2**34})
    host = replace(HOST, memory_bytes=20 * 2**30)
    if fits:
        check_host(made, host)
    else:
        with pytest.raises(PlanError, match=r"15\.3 GiB of weights and 32\.0 GiB of static KV cache"):
            check_host(made, host)


def test_a_context_that_does_not_fit_is_shortened_and_said() -> None:
    made = plan(kv={"reserve": MIB})
    assert int(options(made)["--max-model-len"]) == (made.kv.num_blocks - 1) * 32
    note = next(note for note in made.notes if note.setting == "engine.args.max_model_len")
    enough = int(note.why.rsplit("kv.reserve=", 1)[1].split()[0])
    assert "--max-model-len" not in options(plan(kv={"reserve": enough}))
    assert "--max-model-len" in options(plan(kv={"reserve": enough - 1}))


def test_an_explicit_context_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="max_model_len=4096 does not fit") as caught:
        plan(kv={"reserve": MIB}, args={"max_model_len": 4096})
    assert caught.value.hint is not None
    enough = int(caught.value.hint.split("kv.reserve=")[1].split()[0])
    assert options(plan(kv={"reserve": enough}, args={"max-model-len": 4096}))["--max-model-len"] == "4096"


def test_several_nodes_meet_somewhere() -> None:
    with pytest.raises(PlanError, match=r"needs rdzv\.endpoint"):
        plan(tp=2, nnodes=2)


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ({"nnodes": 2, "tp": 3}, ["nnodes=2", "tp=3", "pp=1", "world_size 3", "pp=2"]),
        ({"nnodes": 2, "tp": 2, "pp": 3}, ["nnodes=2", "tp=2", "pp=3"]),
        ({"nnodes": 4, "tp": 4, "pp": 3}, ["nnodes=4", "tp=4", "pp=3"]),
    ],
)
def test_a_topology_that_cannot_be_placed_is_told_first(root: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(**root)
    assert all(word in str(caught.value) for word in words)


def test_run_ids_are_short_and_differ() -> None:
    long = config(tiny(name="Some/Very long näme with spaces and more"), name=None)
    ids = {new_run_id(long) for _ in range(50)}
    assert len(ids) == 50
    assert all(len(run) <= 24 and run.replace("-", "").replace("_", "").isascii() for run in ids)
    assert all(set(run) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") for run in ids)
    assert new_run_id(config(name="模型")).startswith("run-")


def test_a_local_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("m", "./m", str(tmp_path / "m")):
        made = plan(qwen3_8b(path=path), device="cuda")
        assert made.model.path == str(tmp_path / "m")
        assert made.nodes[0].env["HF_HUB_OFFLINE"] == "1"


def test_a_thousand_ranks_are_planned_at_once() -> None:
    model = qwen3_8b(num_layers=126)
    started = time.perf_counter()
    made = plan(model, device="cuda", tp=16, pp=64, kv={"reserve": 2**36})
    assert time.perf_counter() - started < 0.5
    assert [rank.global_rank for rank in made.ranks] == list(range(1024))
    assert made.kv.num_blocks % made.kv.blocks_per_page == 0


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvlaunch.plan.planner, kvlaunch.plan.host, kvlaunch.engines.vllm.recipe\n"
        "kvlaunch.plan.host.probe_host()\n"
        "print(sorted({'torch', 'zmq', 'hydra', 'psutil', 'rich', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_host_is_probed() -> None:
    host = probe_host({"CUDA_VISIBLE_DEVICES": "0,0"})
    assert host.cpus >= 1
    assert host.numa_nodes >= 1
    assert host.memory_bytes > 2**20
    assert host.python == sys.executable
    with pytest.raises(PlanError):
        _ = host.cuda_visible
