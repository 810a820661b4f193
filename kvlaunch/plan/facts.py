"""What a plan must know of a model, as pure numbers: from the config, or from the model's own config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlaunch.errors import PlanError

if TYPE_CHECKING:
    from kvlaunch.config.schema import ModelConfig

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What distinguishes one decoder from the next, as far as bytes go."""

    qk_norm: bool = False
    """RMSNorm over head_dim for the queries and one for the keys."""
    qkv_bias: bool = False
    norms_per_layer: int = 2
    experts_by_intermediate_size: bool = False
    """config.json gives the experts' size as intermediate_size (Mixtral)."""
    shared_expert: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "MixtralForCausalLM": Architecture(experts_by_intermediate_size=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen2MoeForCausalLM": Architecture(qkv_bias=True, shared_expert=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True),
    "MellumForCausalLM": Architecture(qk_norm=True),
    "Gemma2ForCausalLM": Architecture(norms_per_layer=4),
    "Gemma3ForCausalLM": Architecture(qk_norm=True, norms_per_layer=4),
}
"""Decoders whose layers all keep plain keys and values of one shape: what an elastic KV cache may hold."""

_OTHER_CACHE_KEYS = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "ssm_state_size": "state-space layers",
    "linear_num_value_heads": "linear-attention layers",
    "num_kv_shared_layers": "layers that share a KV cache",
    "global_head_dim": "layers with KV of different shapes",
}
"""Keys of config.json (a value that is set and not 0) that mean another kind of cache than keys and values a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Numbers of one model. Sizes are in elements, `max_context` in tokens."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    num_experts: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    """Layers of a mixture-of-experts model that have a plain MLP."""
    sliding_layers: frozenset[int] = frozenset()
    """Layers whose attention sees a window only."""
    dtype: str = "bfloat16"
    max_context: int | None = None
    quantization: str | None = None
    """Method by which the stored weights are quantised, if they are; byte counts are of the dtype all the same."""

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def known(self) -> Architecture | None:
        """None for an architecture that kvlaunch does not know."""
        return ARCHITECTURES.get(self.architecture)

    def kv_bytes_per_token_layer(self, kv_heads: int, kv_dtype_bytes: int) -> int:
        """Bytes of one token's keys and values in one layer of a rank that holds so many KV heads."""
        return 2 * kv_heads * self.head_dim * kv_dtype_bytes


def load_facts(model: ModelConfig, environ: Mapping[str, str] | None = None) -> ModelFacts:
    """Facts of the configured model: its own numbers, completed from config.json where some are not given.

    config.json is read from `model.path` (else `model.name`) as a local folder, or as a hub id from the local Hugging
    Face cache. Nothing is downloaded.

    Raises:
        PlanError: numbers are missing and no config.json was found, or they contradict each other.
    """
    env = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    if not model.tiny and any(getattr(model, key) is None for key in _REQUIRED):
        source = model.path or model.name
        config_json = _find_config_json(source, env)
        if config_json is not None:
            found = _read_config_json(config_json, model.name)
        elif missing := [key for key in _REQUIRED if getattr(model, key) is None and key not in _DERIVED]:
            raise PlanError(
                f"Nothing is known of model {source!r}: no config.json in a folder of that name nor in the local "
                f"Hugging Face cache ({_hub_cache(env)}).",
                hint="Download it first (hf download), give a local folder as model.path, or give its numbers: "
                + ", ".join(f"model.{key}=..." for key in missing),
            )
    for key in (*_REQUIRED, "max_context"):
        if (value := getattr(model, key)) is not None:
            found[key] = value
    for key, default in _DEFAULTS.items():
        # A default of the schema says nothing where config.json speaks.
        if (value := getattr(model, key)) != default or key not in found:
            found[key] = value
    return _checked(model.name, found)


def elastic_problem(facts: ModelFacts) -> str | None:
    """Why the KV cache of this model cannot be elastic, or None where it can."""
    if facts.known is None:
        return (
            f"{facts.architecture} ({facts.name}) is not among the architectures whose KV cache is known to be plain "
            f"keys and values of one shape in every layer: {', '.join(ARCHITECTURES)}"
        )
    return None


_REQUIRED = (
    "architecture",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)
_DERIVED = ("num_kv_heads", "head_dim")
_DEFAULTS = {"tie_word_embeddings": False, "num_experts": 0, "moe_intermediate_size": 0, "dtype": "bfloat16"}


def _hub_cache(env: Mapping[str, str]) -> Path:
    """The Hugging Face hub cache, by the rules of huggingface_hub: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME."""
    if explicit := env.get("HF_HUB_CACHE"):
        return Path(explicit).expanduser()
    cache = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    home = env.get("HF_HOME") or str(Path(cache) / "huggingface")
    return Path(home).expanduser() / "hub"


def _find_config_json(source: str, env: Mapping[str, str]) -> Path | None:
    local = Path(source).expanduser() / "config.json"
    if local.is_file():
        return local
    if source.startswith(("/", ".", "~")):
        return None
    repo = _hub_cache(env) / f"models--{source.replace('/', '--')}"
    ref = repo / "refs" / "main"
    if ref.is_file():
        pinned = repo / "snapshots" / ref.read_text().strip() / "config.json"
        if pinned.is_file():
            return pinned
    snapshots = sorted(repo.glob("snapshots/*/config.json"), key=lambda p: p.stat().st_mtime)
    return snapshots[-1] if snapshots else None


def _read_config_json(path: Path, name: str) -> dict[str, Any]:
    """The numbers of a Hugging Face config.json under this module's names."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} could not be read as JSON: {error}.", hint="Download the model again.") from error
    if not isinstance(raw, dict):
        raise PlanError(f"{path} is no model configuration: it holds no JSON object.")
    architecture = (raw.get("architectures") or ["unknown"])[0]
    for key, kind in _OTHER_CACHE_KEYS.items():
        if raw.get(key):
            raise PlanError(
                f"{architecture} ({name}) has {kind} ({key} in {path}): kvlaunch cannot compute its KV cache yet.",
                hint="Use a model with plain attention in every layer.",
            )
    for kind in raw.get("layer_types") or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise PlanError(
                f"{architecture} ({name}) has layers of type {kind!r}: kvlaunch cannot compute its KV cache yet.",
                hint="Use a model with plain attention in every layer.",
            )
    experts = raw.get("num_experts") or raw.get("num_local_experts") or 0
    known = ARCHITECTURES.get(architecture, Architecture())
    intermediate = raw.get("intermediate_size")
    found = {
        "architecture": architecture,
        "num_layers": raw.get("num_hidden_layers"),
        "hidden_size": raw.get("hidden_size"),
        "intermediate_size": intermediate,
        "num_heads": raw.get("num_attention_heads"),
        "num_kv_heads": raw.get("num_key_value_heads"),
        "head_dim": raw.get("head_dim"),
        "vocab_size": raw.get("vocab_size"),
        # transformers writes these two only where they differ from the class's default.
        "tie_word_embeddings": raw.get("tie_word_embeddings", architecture.startswith("Gemma")),
        "dtype": _dtype(raw),
        "quantization": (raw.get("quantization_config") or {}).get("quant_method"),
        "num_experts": experts,
        "moe_intermediate_size": (
            intermediate if known.experts_by_intermediate_size else raw.get("moe_intermediate_size", 0)
        ),
        "shared_expert_intermediate_size": raw.get("shared_expert_intermediate_size", 0) if known.shared_expert else 0,
        "max_context": raw.get("max_position_embeddings"),
    }
    layers = found["num_layers"] or 0
    found["dense_layers"] = _dense_layers(raw, layers) if experts else frozenset()
    found["sliding_layers"] = _sliding_layers(raw, architecture, layers)
    return {key: value for key, value in found.items() if value is not None}


def _dtype(raw: Mapping[str, Any]) -> str:
    stored = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    # Engines load float32 weights in 16 bits unless they are told otherwise.
    return "bfloat16" if stored == "float32" else stored


def _dense_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Qwen's rule: a layer has experts unless it is listed in mlp_only_layers or skipped by decoder_sparse_step.
    Mellum's: mlp_layer_types says it of each layer."""
    types = raw.get("mlp_layer_types")
    if isinstance(types, list):
        return frozenset(i for i, kind in enumerate(types) if kind == "dense")
    step = raw.get("decoder_sparse_step") or 1
    only = set(raw.get("mlp_only_layers") or ())
    return frozenset(i for i in range(num_layers) if i in only or (i + 1) % step)


def _sliding_layers(raw: Mapping[str, Any], architecture: str, num_layers: int) -> frozenset[int]:
    types = raw.get("layer_types")
    if isinstance(types, list):
        return frozenset(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if not raw.get("sliding_window") or raw.get("use_sliding_window") is False:
        return frozenset()
    if architecture == "MistralForCausalLM":
        return frozenset(range(num_layers))
    pattern = raw.get("sliding_window_pattern") or {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}.get(architecture)
    if pattern:
        return frozenset(i for i in range(num_layers) if (i + 1) % pattern)
    return frozenset()


def _checked(name: str, found: dict[str, Any]) -> ModelFacts:
    found = dict(found)
    found.setdefault("num_kv_heads", found.get("num_heads"))
    if "head_dim" not in found and found.get("hidden_size") and found.get("num_heads"):
        found["head_dim"] = found["hidden_size"] // found["num_heads"]
    if missing := [key for key in _REQUIRED if not found.get(key)]:
        raise PlanError(
            f"The configuration of model {name!r} does not say {', '.join(missing)}.",
            hint="Give the numbers: " + ", ".join(f"model.{key}=..." for key in missing),
        )
    if found.get("dtype", "bfloat16") not in DTYPE_BYTES:
        raise PlanError(
            f"model.dtype={found['dtype']} ({name}) is not known.", hint=f"Use one of {', '.join(DTYPE_BYTES)}."
        )
    facts = ModelFacts(name=name, **found)
    if facts.num_heads % facts.num_kv_heads:
        raise PlanError(
            f"num_key_value_heads={facts.num_kv_heads} does not divide num_attention_heads={facts.num_heads} ({name})."
        )
    if facts.num_experts and not facts.moe_intermediate_size:
        raise PlanError(f"num_experts={facts.num_experts} ({name}) needs model.moe_intermediate_size.")
    return facts
