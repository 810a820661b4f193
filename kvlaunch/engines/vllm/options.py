"""vLLM's command-line options as kvlaunch sees them: its own, those that it refuses, and how the rest is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvlaunch.errors import PlanError

OWNED: Mapping[str, str] = {
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
"""Options that kvlaunch sets itself -> the setting of kvlaunch to use."""

NOT_OURS: Mapping[str, str] = {
    "distributed_executor_backend": "kvlaunch always uses mp, so that every rank is a process of its own",
    "headless": "kvlaunch decides which node serves HTTP",
    "config": "write the file's lines as engine.args instead, so that the plan shows them",
    "data_parallel_size": "data parallelism is not supported; start one run for each replica",
    "data_parallel_size_local": "data parallelism is not supported; start one run for each replica",
    "data_parallel_rank": "data parallelism is not supported; start one run for each replica",
    "api_server_count": "one API process serves a run",
}
"""Options that no run can take -> why."""

NOT_ELASTIC: Mapping[str, str] = {
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
"""Options that kv=elastic cannot do yet -> why."""

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


def check_options(args: Mapping[str, Any], *, elastic: bool) -> None:
    """Refuse options that kvlaunch owns or cannot do, by name.

    Raises:
        PlanError
    """
    for name, value in args.items():
        if name in OWNED:
            raise PlanError(
                f"engine.args.{name}: kvlaunch sets this option of vLLM itself.", hint=f"Use {OWNED[name]}=... instead."
            )
        if _is_off(name, value):
            continue
        if name in NOT_OURS:
            raise PlanError(f"engine.args.{name}={value}: {NOT_OURS[name]}.", hint=f"Leave engine.args.{name} out.")
        if elastic and name in NOT_ELASTIC:
            raise PlanError(
                f"engine.args.{name} does not work with kv=elastic yet: {NOT_ELASTIC[name]}.",
                hint=f"Leave engine.args.{name} out, or use kv=static.",
            )
    attention = args.get("attention_config")
    if elastic and isinstance(attention, Mapping) and attention.get("hisparse_config"):
        raise PlanError(
            "engine.args.attention_config.hisparse_config does not work with kv=elastic yet: it keeps blocks in host "
            "memory.",
            hint="Leave it out, or use kv=static.",
        )


def _is_off(name: str, value: Any) -> bool:
    """True where the option is as good as unset: null, a flag that is off, a number of parallel parts that is 1."""
    if value is None or value is False:
        return True
    return type(value) is int and (value == 0 or (value == 1 and name in _PARTS))


def kv_dtype_bytes(args: Mapping[str, Any], model_dtype_bytes: int) -> int:
    """Bytes of one element of the KV cache.

    Raises:
        PlanError: a kv_cache_dtype whose blocks hold more than keys and values.
    """
    dtype = args.get("kv_cache_dtype") or "auto"
    if dtype == "auto":
        return model_dtype_bytes
    if dtype not in KV_DTYPE_BYTES:
        raise PlanError(
            f"engine.args.kv_cache_dtype={dtype}: kvlaunch cannot compute the size of its blocks.",
            hint=f"Use one of auto, {', '.join(KV_DTYPE_BYTES)}.",
        )
    return KV_DTYPE_BYTES[dtype]


def render(args: Mapping[str, Any]) -> list[str]:
    """Options as vLLM's command line wants them.

    `max_model_len: 4096` becomes `--max-model-len 4096`; true a bare flag; false `--no-...`; null nothing; a mapping
    JSON; a list several values after the option.
    """
    argv: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                argv.append(f"--{flag}")
            case False:
                argv.append(f"--no-{flag}")
            case Mapping():
                argv += [f"--{flag}", json.dumps(value)]
            case list() | tuple():
                argv += [f"--{flag}", *(item if isinstance(item, str) else json.dumps(item) for item in value)]
            case _:
                argv += [f"--{flag}", str(value)]
    return argv
