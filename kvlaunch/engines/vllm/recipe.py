"""vLLM in a plan: what it can do, how it lays out the KV cache, and how it is started. Imports nothing of vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvlaunch.engines.base import (
    LOCAL_ADDR,
    LOCAL_INTERFACE,
    MASTER_ADDR,
    MASTER_PORT,
    Command,
    Draft,
    EngineRecipe,
    merge_env,
)
from kvlaunch.engines.options import kv_dtype_bytes, render
from kvlaunch.engines.vllm import layout
from kvlaunch.engines.vllm.options import KV_DTYPE_BYTES, check_options
from kvlaunch.errors import PlanError
from kvlaunch.plan.kv import KVShape, capacity_tokens, reserve_for
from kvlaunch.plan.topology import LayerRange, even_layers, layers_from_counts
from kvlaunch.plan.types import Note

if TYPE_CHECKING:
    from kvlaunch.plan.types import KVPlan, ModelPlan

PARTITION = "VLLM_PP_LAYER_PARTITION"

_FORKING_SERVER = "kvlaunch.engines.vllm.serve"

_CPU_COMPILATION = {"mode": 2, "backend": "eager"}
"""Run the warm-up and compile nothing. Without a warm-up (mode 0 and a KV cache of given size, see
_should_warm_up_model in vllm/v1/worker/cpu_worker.py) the buffers between stages are never made and the first request
fails; with vLLM's default mode every start compiles for minutes."""


class VLLMRecipe(EngineRecipe):
    """vLLM's recipe. Rules and defaults are those of vLLM 0.32."""

    name = "vllm"
    versions = ">=0.32,<0.33"

    def check(self, draft: Draft) -> None:
        check_options(draft.args, elastic=draft.config.kv.mode.value == "elastic")
        if draft.device == "cpu" and draft.topology.pp_size > 1:
            for option in ("enforce_eager", "enable_lora"):
                if draft.args.get(option):
                    raise PlanError(
                        f"engine.args.{option} with pp={draft.topology.pp_size} on device=cpu: vLLM then skips its "
                        "warm-up and the first request fails on stage 1.",
                        hint="Leave it out (nothing is compiled on the CPU anyway)."
                        if option == "enforce_eager"
                        else "Use pp=1.",
                    )

    def layers(self, draft: Draft) -> tuple[LayerRange, ...]:
        pp_size, num_layers = draft.topology.pp_size, draft.facts.num_layers
        given = draft.config.engine.env.get(PARTITION)
        if given is None:
            return even_layers(num_layers, pp_size)
        counts = [int(part) if part.strip().isdigit() else 0 for part in given.split(",")]
        if len(counts) != pp_size or sum(counts) != num_layers or min(counts) < 1:
            raise PlanError(
                f"engine.env.{PARTITION}={given} must list pp={pp_size} numbers of layers, each at least 1, that sum "
                f"to num_hidden_layers={num_layers} ({draft.facts.name})."
            )
        return layers_from_counts(counts)

    def kv_shape(self, draft: Draft, split: tuple[LayerRange, ...]) -> KVShape:
        facts = draft.facts
        token_bytes = facts.kv_bytes_per_token_layer(
            draft.topology.kv_heads_per_rank(facts.num_kv_heads),
            kv_dtype_bytes(draft.args, facts.dtype_bytes, KV_DTYPE_BYTES),
        )
        block_size = draft.config.kv.block_size or layout.default_block_size(draft.device, token_bytes)
        return KVShape(
            block_size=block_size,
            block_bytes=token_bytes * block_size,
            stage_layers=layout.layers_per_block(
                facts, split, hybrid=not draft.args.get("disable_hybrid_kv_cache_manager")
            ),
        )

    def command(self, draft: Draft, *, node_rank: int, model: ModelPlan, kv: KVPlan, shape: KVShape) -> Command:
        notes: list[Note] = []
        if draft.config.kv.block_size is None:
            notes.append(
                Note(setting="kv.block_size", value=str(kv.block_size), why=layout.why_block_size(draft.device))
            )
        options: dict[str, Any] = {
            "model": model.path,
            "served_model_name": model.name,
            "host": draft.config.server.host,
            "port": draft.config.server.port,
            "dtype": model.dtype,
            "tensor_parallel_size": draft.topology.tp_size,
            "pipeline_parallel_size": draft.topology.pp_size,
            # Always, also for one rank: every rank a process of its own, with its own log and KV region.
            "distributed_executor_backend": "mp",
            "block_size": kv.block_size,
            "num_gpu_blocks_override": kv.num_blocks,
            "kv_cache_memory_bytes": _memory_bytes(kv, shape),
        }
        options.update(_max_model_len(draft, kv, shape, notes))
        if draft.topology.nnodes > 1:
            options |= {
                "nnodes": draft.topology.nnodes,
                "node_rank": node_rank,
                "master_addr": MASTER_ADDR,
                "master_port": MASTER_PORT,
            }
        if node_rank > 0:
            options["headless"] = True
        if draft.device == "cpu" and not {"compilation_config", "enforce_eager"} & draft.args.keys():
            options["compilation_config"] = _CPU_COMPILATION
            notes.append(
                Note(
                    setting="engine.args.compilation_config",
                    value=json.dumps(_CPU_COMPILATION),
                    why="runs vLLM's warm-up, which pp > 1 needs, and compiles nothing, so that starting is quick",
                )
            )
        own = _cpu_env(draft, notes) if draft.device == "cpu" else {}
        env, unset = merge_env(
            {**_common_env(draft, model), **own}, draft.config.engine.env, (PARTITION, "VLLM_CPU_KVCACHE_SPACE")
        )
        python = draft.config.engine.python or draft.host.python
        argv = [python, "-m", _server(draft, notes), *render(options | draft.args, negate=True)]
        return Command(argv=tuple(argv), env=env, unset=unset, notes=tuple(notes))


def _server(draft: Draft, notes: list[Note]) -> str:
    """The module that serves."""
    if draft.device != "cpu" and draft.topology.nnodes == 1:
        return "vllm.entrypoints.openai.api_server"
    if draft.device == "cpu":
        why = "vLLM's own server; its scheduler and its ranks are forked from one process that has imported vLLM"
    else:
        why = "vLLM's own server on node 0, its ranks alone on the others"
    notes.append(Note(setting="engine.argv", value=f"-m {_FORKING_SERVER}", why=why))
    return _FORKING_SERVER


def _memory_bytes(kv: KVPlan, shape: KVShape) -> int:
    """Value of --kv-cache-memory-bytes.

    vLLM compares it with the memory that is free at the start (determine_available_memory in
    vllm/v1/worker/cpu_worker.py) and then sizes the cache by --num-gpu-blocks-override alone (get_kv_cache_configs in
    vllm/v1/core/kv_cache_utils.py). An elastic cache commits one page at the start, a static one all of it.
    """
    if kv.mode == "static":
        return kv.reserve_bytes
    return kv.blocks_per_page * shape.block_bytes * shape.largest


def _max_model_len(draft: Draft, kv: KVPlan, shape: KVShape, notes: list[Note]) -> dict[str, Any]:
    """--max-model-len where the model's own context does not fit into the KV cache: vLLM refuses to start then."""
    asked, context = draft.args.get("max_model_len"), draft.facts.max_context
    if layout.is_hybrid(draft.facts) and not draft.args.get("disable_hybrid_kv_cache_manager"):
        # A window needs fewer blocks than a full context: vLLM's own search for the longest that fits.
        return {} if asked is not None else {"max_model_len": "auto"}
    fits = capacity_tokens(kv)
    if isinstance(asked, int) and asked > fits:
        raise PlanError(
            f"engine.args.max_model_len={asked} does not fit: kv.reserve={int(draft.config.kv.reserve)} holds {fits} "
            f"tokens ({kv.num_blocks} blocks of {kv.block_size} tokens, one of them the null block).",
            hint=f"Use kv.reserve={reserve_for(asked, kv, shape)} or more, or max_model_len={fits} or less.",
        )
    if asked is not None or context is None or context <= fits:
        return {}
    why = (
        f"kv.reserve holds {fits} tokens a sequence and the model's context is {context}; "
        f"kv.reserve={reserve_for(context, kv, shape)} would hold it"
    )
    notes.append(Note(setting="engine.args.max_model_len", value=str(fits), why=why))
    return {"max_model_len": fits}


def _common_env(draft: Draft, model: ModelPlan) -> dict[str, str]:
    env = {
        # kvlaunch's plugin alone: others could patch what the elastic cache relies on.
        "VLLM_PLUGINS": "kvlaunch",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, round(draft.config.timeouts.ready_s))),
    }
    if draft.device == "cpu" or draft.config.kv.mode.value == "elastic":
        # The elastic cache was tested with the first model runner, and so was everything on the CPU.
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if draft.topology.nnodes == 1:
        # Ranks of one host meet on the loopback, whatever the host's name resolves to.
        env |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    else:
        env |= {
            "VLLM_HOST_IP": LOCAL_ADDR,
            "GLOO_SOCKET_IFNAME": LOCAL_INTERFACE,
            "NCCL_SOCKET_IFNAME": LOCAL_INTERFACE,
        }
    if model.path.startswith("/"):
        env["HF_HUB_OFFLINE"] = "1"
    return env


def _cpu_env(draft: Draft, notes: list[Note]) -> dict[str, str]:
    """Threads of the ranks on this node. vLLM binds one rank to each NUMA node by itself and refuses more."""
    local = draft.topology.ranks_per_node
    if local <= draft.host.numa_nodes:
        return {}
    threads = max(1, draft.host.cpus // local)
    notes.append(
        Note(
            setting="engine.env.VLLM_CPU_OMP_THREADS_BIND",
            value="nobind",
            why=f"{local} ranks are more than {draft.host.numa_nodes} NUMA node(s), and vLLM refuses to bind those",
        )
    )
    notes.append(
        Note(
            setting="engine.env.OMP_NUM_THREADS",
            value=str(threads),
            why=f"{draft.host.cpus} CPUs over {local} ranks",
        )
    )
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
