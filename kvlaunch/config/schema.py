"""The typed config: what the composed overrides must look like.

Hydra checks every value against these classes; `validate` (validate.py) checks what types cannot say. Byte sizes may
be written as integers or as strings such as `512MiB`, `2GiB`, `1.5GiB`; composition turns them into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MISSING: Any = "???"
"""omegaconf.MISSING, spelled out: shell completion reads this module and has no time to import omegaconf."""

Bytes = str | int
"""A number of bytes, or a string such as `2GiB`; an integer once composed."""


class EngineName(Enum):
    vllm = "vllm"
    sglang = "sglang"


class KVModeName(Enum):
    elastic = "elastic"
    static = "static"


class DeviceName(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class RdzvBackend(Enum):
    c10d = "c10d"
    static = "static"


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """Group `engine`: which engine, and how it is started."""

    name: EngineName = MISSING
    python: str | None = None
    """Interpreter of the engine's environment; null: the one that runs kvlaunch."""
    args: dict[str, Any] = field(default_factory=dict)
    """Options of the engine itself, `max_model_len: 4096` for `--max-model-len 4096`; true for a bare flag."""
    env: dict[str, str | None] = field(default_factory=dict)
    """Variables for the engine's processes; null removes one."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Group `model`: which model, and the public numbers of its architecture.

    A hub id or a local folder may stand in place of a choice of the group; the numbers then come from its config.json.
    """

    name: str = MISSING
    """Name that the server serves the model under."""
    path: str | None = None
    """Hub id or local folder that the engine loads; null: `name`."""
    tiny: bool = False
    """Made locally on first use: fixed-seed random weights, no download."""
    architecture: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool = False
    num_experts: int = 0
    """Routed experts a layer; 0 for a dense model."""
    moe_intermediate_size: int = 0
    dtype: str = "bfloat16"
    max_context: int | None = None
    """Tokens, max_position_embeddings of the model."""


@dataclass(kw_only=True, slots=True)
class KVCacheKeepConfig:
    """`kv.cache`: prefix-cached blocks that no request uses."""

    keep: Bytes = 0
    """Bytes a rank that stay mapped however long they idle."""
    idle_s: float = 30.0
    """Seconds after which those beyond `keep` go back, least recently used first."""


@dataclass(kw_only=True, slots=True)
class KVAheadConfig:
    """`kv.ahead`: free pages kept mapped ahead of need while the engine is busy."""

    low: int = 4
    """Below this many the background thread maps more."""
    high: int = 16
    """It maps up to this many."""


@dataclass(kw_only=True, slots=True)
class KVConfig:
    """Group `kv`: the KV cache."""

    mode: KVModeName = MISSING
    reserve: Bytes = "2GiB"
    """Address space of the KV cache a rank (elastic), or memory committed at start (static). Bytes, or `2GiB`."""
    block_size: int | None = None
    """Tokens in a block; null: what suits the engine and the device."""
    page: Bytes | None = None
    """Least bytes of a page in each layer of a rank; null: the smallest that the memory backend can map."""
    guard: bool = True
    """Make a touch of unmapped memory crash at once (host memory)."""
    commit_timeout_s: float = 5.0
    """Deadline of one map or unmap over all ranks."""
    ahead: KVAheadConfig = field(default_factory=KVAheadConfig)
    cache: KVCacheKeepConfig = field(default_factory=KVCacheKeepConfig)


@dataclass(kw_only=True, slots=True)
class DeviceConfig:
    """Group `device`: what the ranks run on."""

    name: DeviceName = MISSING


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Group `cluster`: where the nodes are."""

    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """`server`: the OpenAI-compatible HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""


@dataclass(kw_only=True, slots=True)
class RdzvConfig:
    """`rdzv`: torchrun's rendezvous options."""

    backend: RdzvBackend = RdzvBackend.c10d
    endpoint: str | None = None
    """host:port; null on one node: a free port of this host."""
    id: str | None = None
    """Shared by the nodes of one run; null: made for this run (on several nodes: from the endpoint)."""
    timeout_s: float = 300.0
    secret_file: str | None = None
    """File with the secret that the nodes of a run share, readable by nobody else; null: KVLAUNCH_SECRET."""


@dataclass(kw_only=True, slots=True)
class TimeoutsConfig:
    """`timeouts`, in seconds."""

    ready_s: float = 1800.0
    """From the start until the engine answers a one-token completion."""
    drain_s: float = 5.0
    """After a stop: running requests may finish."""
    term_s: float = 10.0
    """Between SIGTERM and SIGKILL."""
    node_s: float = 10.0
    """Several nodes: one that is silent for so long counts as gone."""
    hung_s: float = 30.0
    """While serving: a rank whose KV listener is silent for so long counts as hung, and the engine as failed."""


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """The root. `kvlaunch config` prints it composed."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tp: int = 1
    """Tensor-parallel size: ranks of one pipeline stage."""
    pp: int = 1
    """Pipeline-parallel size: number of stages."""
    nnodes: int = 1
    node_rank: int | None = None
    local_addr: str | None = None
    """Address by which the other nodes reach this one; null: the one that leads to the endpoint."""
    max_restarts: int = 0
    """Times that a failed engine is started again."""
    name: str | None = None
    """Name of the run in `kvlaunch ps`; null: made from the model's name."""
    server: ServerConfig = field(default_factory=ServerConfig)
    rdzv: RdzvConfig = field(default_factory=RdzvConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
