"""vLLM's command-line options as kvlaunch sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlaunch.engines.options import OptionRules
from kvlaunch.errors import PlanError

_OWNED: Mapping[str, str] = {
    "model": "model",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "host": "server.host",
    "port": "server.port",
    "uds": "server.host and server.port",
    "tensor_parallel_size": "tp",
    "tp": "tp",
    "pipeline_parallel_size": "pp",
    "pp": "pp",
    "nnodes": "nnodes",
    "node_rank": "node_rank",
    "master_addr": "rdzv.endpoint",
    "master_port": "rdzv.endpoint",
    "block_size": "kv.block_size",
    "num_gpu_blocks_override": "kv.reserve",
    "kv_cache_memory_bytes": "kv.reserve",
}

_NOT_OURS: Mapping[str, str] = {
    "distributed_executor_backend": "kvlaunch always uses mp, so that every rank is a process of its own",
    "headless": "kvlaunch decides which node serves HTTP",
    "config": "write the file's lines as engine.args instead, so that the plan shows them",
    "data_parallel_size": "data parallelism is not supported; start one run for each replica",
    "data_parallel_size_local": "data parallelism is not supported; start one run for each replica",
    "data_parallel_rank": "data parallelism is not supported; start one run for each replica",
    "api_server_count": "one API process serves a run",
}

_NOT_ELASTIC: Mapping[str, str] = {
    "kv_transfer_config": "a KV connector reads and writes blocks outside the scheduler's steps",
    "kv_offloading_size": "offloading copies blocks outside the scheduler's steps",
    "kv_offloading_backend": "offloading copies blocks outside the scheduler's steps",
    "decode_context_parallel_size": "blocks are then cut over ranks in another way",
    "dcp": "blocks are then cut over ranks in another way",
    "prefill_context_parallel_size": "blocks are then cut over ranks in another way",
    "pcp": "blocks are then cut over ranks in another way",
    "enable_sleep_mode": "sleep mode frees the KV cache itself",
    "enable_cumem_allocator": "vLLM's own allocator then owns the KV cache",
    "speculative_config": "a draft model adds KV layers that the plan does not know",
    "spec_method": "a draft model adds KV layers that the plan does not know",
    "spec_model": "a draft model adds KV layers that the plan does not know",
    "kv_sharing_fast_prefill": "layers then share a KV cache",
    "enable_elastic_ep": "ranks then come and go",
    "enable_fault_tolerance": "ranks then come and go",
    "fault_tolerance_config": "ranks then come and go",
    "scheduler_cls": "the elastic cache works inside vLLM's own scheduler",
    "worker_cls": "the elastic cache works inside vLLM's own workers",
    "kv_cache_dtype_skip_layers": "layers then have KV of different shapes",
}

_PARTS = (
    "data_parallel_size",
    "data_parallel_size_local",
    "api_server_count",
    "decode_context_parallel_size",
    "dcp",
    "prefill_context_parallel_size",
    "pcp",
)

KV_DTYPE_BYTES: Mapping[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


RULES = OptionRules(engine="vLLM", owned=_OWNED, never=_NOT_OURS, not_elastic=_NOT_ELASTIC, parts=_PARTS)


def check_options(args: Mapping[str, Any], *, elastic: bool) -> None:
    """Refuse options that kvlaunch owns or cannot do, by name.

    Raises:
        PlanError
    """
    RULES.check(args, elastic=elastic)
    attention = args.get("attention_config")
    if elastic and isinstance(attention, Mapping) and attention.get("hisparse_config"):
        raise PlanError(
            "engine.args.attention_config.hisparse_config does not work with kv=elastic yet: it keeps blocks in host "
            "memory.",
            hint="Leave it out, or use kv=static.",
        )
