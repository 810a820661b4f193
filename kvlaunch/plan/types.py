"""The LaunchPlan: everything that a run is, decided before anything starts.

A plan is plain data (`msgspec.Struct`, frozen). `kvlaunch plan --json` prints it, `kvlaunch up` executes it and
stores it as `plan.json` in the run folder, and the code that is plugged into the engine reads it from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

KVMode = Literal["elastic", "static"]


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: where it runs and what it holds. Byte counts are for this rank alone."""

    global_rank: int
    pp_rank: int
    tp_rank: int
    node_rank: int
    local_rank: int
    device: str
    """`cpu` or `cuda:<index>` (the index as the engine sees it on that node)."""
    layers: tuple[int, int]
    """First and last layer, both included."""
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    """Bytes of one KV block over all layers of this rank that it covers: every one, but where layers with a sliding
    window and layers with full attention take turns (they then share the same blocks' memory)."""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage and its KV listener."""

    pp_rank: int
    leader: int
    """Global rank of the stage's tp_rank 0, which runs the StageListener."""
    ranks: tuple[int, ...]
    node_rank: int
    """Node of the leader."""
    endpoint: str
    """ZeroMQ endpoint of the StageListener on its own host, `ipc://...`."""
    network: bool = False
    """It also listens on the network, for the nodes that hold other stages."""


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process: a node runs exactly one, and the engine makes its ranks from it."""

    node_rank: int
    ranks: tuple[int, ...]
    argv: tuple[str, ...]
    """Words in ${...} stand for what is known only when the nodes have met (kvlaunch/launch/enter.py)."""
    env: dict[str, str]
    """What is set on top of the environment that kvlaunch was started with. ${...} as in argv."""
    unset: tuple[str, ...] = ()
    """Variables removed from that environment."""


class KVPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache. A block is the engine's unit, a page the unit of physical memory (a whole number of blocks)."""

    mode: KVMode
    block_size: int
    """Tokens in a block."""
    num_blocks: int
    """Blocks of address space in every rank, block 0 (the null block) included; a multiple of blocks_per_page."""
    blocks_per_page: int
    granularity: int
    """Bytes: every byte range of a page starts and ends on a multiple of it."""
    reserve_bytes: int
    """Address space of the largest rank."""
    guard: bool
    """Unmapped host memory is PROT_NONE: a touch of it crashes."""
    ahead_low: int
    ahead_high: int
    """Free mapped pages: below `low` the background thread maps until `high`."""
    cache_keep_bytes: int
    """Bytes a rank of prefix-cached blocks, not in use, that stay mapped however long they idle."""
    cache_idle_s: float
    """Seconds after which cached blocks beyond the kept ones go back."""
    commit_timeout_s: float
    """Deadline of one map or unmap over all ranks."""


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    """0 only in a plan that is not executed: `up` chooses a free port before it plans."""


class RendezvousPlan(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    endpoint: str
    id: str
    timeout_s: float
    node_rank: int | None = None
    """What this node was told to be; None: the rendezvous decides."""
    local_addr: str | None = None
    """Address by which the other nodes reach this one; None: found when it starts."""
    secret_file: str | None = None


class TimeoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    ready_s: float
    """From the start until the engine answers."""
    drain_s: float
    """After a stop was asked for: running requests may finish."""
    term_s: float
    """Between SIGTERM and SIGKILL."""
    node_s: float = 10.0
    """A node that is silent for so long counts as gone."""
    hung_s: float = 30.0
    """A rank that is silent for so long while the engine serves counts as hung."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that the planner made for the user, and why."""

    setting: str
    value: str
    why: str


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """What the user asked for, and the name that the server serves the model under."""
    path: str
    """What the engine loads: a local folder or a hub id."""
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    make_tiny: bool = False
    """The folder is made locally on first use (fixed-seed random weights)."""


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvlaunch plan` prints and `kvlaunch up` executes."""

    run: str
    """Run id: namespaces sockets, files and rendezvous. Letters, digits, `-`, `_`."""
    name: str
    engine: Literal["vllm", "sglang"]
    engine_python: str
    model: ModelPlan
    device: Literal["cpu", "cuda"]
    tp_size: int
    pp_size: int
    nnodes: int
    world_size: int
    """tp_size * pp_size."""
    ranks: tuple[RankPlan, ...]
    stages: tuple[StagePlan, ...]
    nodes: tuple[NodePlan, ...]
    kv: KVPlan
    server: ServerPlan
    rdzv: RendezvousPlan
    max_restarts: int
    timeouts: TimeoutPlan
    notes: tuple[Note, ...]

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of one page of the KV cache in each rank, by global rank."""
        return [self.kv.blocks_per_page * rank.kv_bytes_per_block for rank in self.ranks]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes) -> LaunchPlan:
        """Raises msgspec.ValidationError where data is not a plan of this version."""
        return msgspec.json.decode(data, type=cls)

    @classmethod
    def load(cls, path: Path) -> LaunchPlan:
        return cls.from_json(path.read_bytes())
