"""SGLang's command-line options as kvlaunch sees them."""

from __future__ import annotations

from collections.abc import Mapping

from kvlaunch.engines.options import OptionRules

_NO_REPLICAS = "data parallelism is not supported; start one run for each replica"
_OTHER_SERVER = "kvlaunch serves through SGLang's own HTTP server"
_OTHER_POOL = "SGLang then lays the KV cache out in another way"
_OUTSIDE = "it copies KV slots outside the scheduler's steps"
_DRAFT = "a draft model adds a KV cache that the plan does not know"
_RANKS_GO = "ranks then come and go"

RULES = OptionRules(
    engine="SGLang",
    owned={
        "model": "model",
        "model_path": "model",
        "served_model_name": "model.name",
        "dtype": "model.dtype",
        "device": "device",
        "host": "server.host",
        "port": "server.port",
        "tp": "tp",
        "tp_size": "tp",
        "tensor_parallel_size": "tp",
        "pp_size": "pp",
        "pipeline_parallel_size": "pp",
        "nnodes": "nnodes",
        "node_rank": "node_rank",
        "dist_init_addr": "rdzv.endpoint",
        "nccl_init_addr": "rdzv.endpoint",
        "page_size": "kv.block_size",
        "max_total_tokens": "kv.reserve",
    },
    never={
        "config": "write the file's lines as engine.args instead, so that the plan shows them",
        "dp": _NO_REPLICAS,
        "dp_size": _NO_REPLICAS,
        "data_parallel_size": _NO_REPLICAS,
        "enable_dp_attention": _NO_REPLICAS,
        "use_ray": "kvlaunch starts the ranks as processes of this host",
        "grpc_mode": _OTHER_SERVER,
        "smg_grpc_mode": _OTHER_SERVER,
        "encoder_only": _OTHER_SERVER,
        "sidecar": _OTHER_SERVER,
    },
    not_elastic={
        "disaggregation_mode": "another engine then writes into the KV cache",
        "enable_hierarchical_cache": _OUTSIDE,
        "enable_hisparse": _OUTSIDE,
        "enable_lmcache": _OUTSIDE,
        "enable_flexkv": _OUTSIDE,
        "enable_unified_cache_external_linker": _OUTSIDE,
        "enable_memory_saver": "SGLang then takes the memory of the KV cache away itself",
        "enable_unified_memory": _OTHER_POOL,
        "enable_page_major_kv_layout": _OTHER_POOL,
        "enable_kv_cache_sharding": _OTHER_POOL,
        "prefill_only_disable_kv_cache": _OTHER_POOL,
        "attn_cp_size": _OTHER_POOL,
        "dcp_size": _OTHER_POOL,
        "kv_canary": _OTHER_POOL,
        "speculative_algorithm": _DRAFT,
        "speculative_draft_model_path": _DRAFT,
        "dllm_algorithm": "its steps are not those of a plain decoder",
        "enable_pdmux": "its steps overlap in a way that the elastic cache does not follow",
        "elastic_ep_backend": _RANKS_GO,
        "swa_full_tokens_ratio": "both pools have as many slots, and memory behind those that are used",
    },
    parts=("dp", "dp_size", "data_parallel_size", "attn_cp_size", "dcp_size"),
)

KV_DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
