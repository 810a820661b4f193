"""SGLang in a plan: what it can do, how it lays out the KV cache, and how it is started. Imports nothing of SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlaunch.engines.base import LOCAL_ADDR, LOCAL_INTERFACE, MASTER, Command, Draft, EngineRecipe, merge_env
from kvlaunch.engines.options import kv_dtype_bytes, render
from kvlaunch.engines.sglang.options import KV_DTYPE_BYTES, RULES
from kvlaunch.errors import PlanError
from kvlaunch.plan.kv import KVShape, capacity_tokens
from kvlaunch.plan.topology import LayerRange, layers_from_counts
from kvlaunch.plan.types import Note

if TYPE_CHECKING:
    from kvlaunch.plan.facts import ModelFacts
    from kvlaunch.plan.types import KVPlan, ModelPlan

PARTITION = "SGLANG_PP_LAYER_PARTITION"
_FORKING_SERVER = "kvlaunch.engines.sglang.serve"
BIND = "SGLANG_CPU_OMP_THREADS_BIND"

_TWO_POOLS = frozenset({"MellumForCausalLM"})
"""Architectures for whose layers with a sliding window SGLang has a pool of their own (is_hybrid_swa_model in
sglang/srt/configs/model_config.py); those of other architectures share the one pool."""

_CPU_OPTIONS: dict[str, tuple[Any, str]] = {
    "attention_backend": ("torch_native", "PyTorch's own kernels: SGLang's CPU kernels are in no public package"),
    "sampling_backend": ("pytorch", "the others are for GPUs"),
    "grammar_backend": ("none", "constrained output is left out unless it is asked for"),
    "mem_fraction_static": (0.9, "kv.reserve says how large the KV cache is, and not what is free at start"),
    "sleep_on_idle": (True, "an idle rank would keep a CPU busy by asking for requests"),
    "skip_server_warmup": (True, "readiness is a completion of kvlaunch's own"),
}
"""Options on the CPU: value, and why."""


class SGLangRecipe(EngineRecipe):
    """SGLang's recipe. Rules and defaults are those of SGLang 0.5.23."""

    name = "sglang"
    versions = ">=0.5.23,<0.5.24"

    def check(self, draft: Draft) -> None:
        elastic = draft.config.kv.mode.value == "elastic"
        RULES.check(draft.args, elastic=elastic)
        if elastic and draft.device == "cuda":
            raise PlanError(
                "kv=elastic does not work with engine=sglang on device=cuda yet.", hint="Use kv=static, or device=cpu."
            )
        if elastic and draft.facts.sliding_layers and not _has_two_pools(draft.facts):
            raise PlanError(
                f"kv=elastic: {draft.facts.architecture} ({draft.facts.name}) has layers with a sliding window, "
                f"which was tried with {', '.join(sorted(_TWO_POOLS))} only.",
                hint="Use kv=static.",
            )

    def layers(self, draft: Draft) -> tuple[LayerRange, ...]:
        """SGLang's rule (get_pp_indices in sglang/srt/distributed/utils.py): what is left over goes to the last stages,
        one layer each."""
        pp_size, num_layers = draft.topology.pp_size, draft.facts.num_layers
        given = draft.config.engine.env.get(PARTITION)
        if given is None or pp_size == 1:
            base, extra = divmod(num_layers, pp_size)
            return layers_from_counts([base + (stage >= pp_size - extra) for stage in range(pp_size)])
        counts = [int(part) if part.strip().isdigit() else 0 for part in given.split(",")]
        if len(counts) != pp_size or sum(counts) != num_layers or min(counts) < 1:
            raise PlanError(
                f"engine.env.{PARTITION}={given} must list pp={pp_size} numbers of layers, each at least 1, that sum "
                f"to num_hidden_layers={num_layers} ({draft.facts.name})."
            )
        return layers_from_counts(counts)

    def kv_shape(self, draft: Draft, split: tuple[LayerRange, ...]) -> KVShape:
        facts = draft.facts
        if _has_two_pools(facts) and draft.config.kv.mode.value == "elastic":
            _check_stages(facts, split)
        token_bytes = facts.kv_bytes_per_token_layer(
            draft.topology.kv_heads_per_rank(facts.num_kv_heads),
            kv_dtype_bytes(draft.args, facts.dtype_bytes, KV_DTYPE_BYTES),
        )
        block_size = draft.config.kv.block_size or 1
        return KVShape(
            block_size=block_size,
            block_bytes=token_bytes * block_size,
            stage_layers=tuple(last - first + 1 for first, last in split),
            strips_per_layer=2,
        )

    def command(self, draft: Draft, *, node_rank: int, model: ModelPlan, kv: KVPlan, shape: KVShape) -> Command:
        notes: list[Note] = []
        if draft.config.kv.block_size is None:
            notes.append(Note(setting="kv.block_size", value=str(kv.block_size), why="SGLang's default page_size"))
        options: dict[str, Any] = {
            "model_path": model.path,
            "served_model_name": model.name,
            "host": draft.config.server.host,
            "port": draft.config.server.port,
            "dtype": model.dtype,
            "device": draft.device,
            "tp_size": draft.topology.tp_size,
            "pp_size": draft.topology.pp_size,
            "page_size": kv.block_size,
            # Slot 0 (page 0 of several tokens), where padded tokens are written, is not among them.
            "max_total_tokens": capacity_tokens(kv),
            # The launcher asks it how many requests are in work before it ends the engine.
            "enable_metrics": True,
        }
        if draft.topology.nnodes > 1:
            options |= {"nnodes": draft.topology.nnodes, "node_rank": node_rank, "dist_init_addr": MASTER}
        if _has_two_pools(draft.facts) and "swa_full_tokens_ratio" not in draft.args:
            options["swa_full_tokens_ratio"] = 1.0
            why = "kv.reserve counts as many slots for layers with a sliding window as for others; SGLang's own: 0.8"
            notes.append(Note(setting="engine.args.swa_full_tokens_ratio", value="1.0", why=why))
        own = _common_env(draft, model)
        if draft.device == "cpu":
            for name, (value, why) in _CPU_OPTIONS.items():
                if name not in draft.args:
                    options[name] = value
                    notes.append(Note(setting=f"engine.args.{name}", value=str(value), why=why))
            own |= _cpu_env(draft, notes)
        env, unset = merge_env(own, draft.config.engine.env, (PARTITION, BIND, "SGLANG_USE_CPU_ENGINE"))
        python = draft.config.engine.python or draft.host.python
        argv = [python, "-m", _server(draft, notes), *render(options | draft.args, negate=False)]
        return Command(argv=tuple(argv), env=env, unset=unset, notes=tuple(notes))


def _has_two_pools(facts: ModelFacts) -> bool:
    return facts.architecture in _TWO_POOLS and bool(facts.sliding_layers)


def _check_stages(facts: ModelFacts, split: tuple[LayerRange, ...]) -> None:
    """Raises PlanError where SGLang would not give every stage both pools: the ranks would count different slots."""
    for pp_rank, (first, last) in enumerate(split):
        sliding = sum(layer in facts.sliding_layers for layer in range(first, last + 1))
        if sliding in (0, last - first + 1):
            raise PlanError(
                f"Stage {pp_rank} (layers {first}-{last}) of {facts.name} has only layers with "
                f"{'a sliding window' if sliding else 'full attention'}: kv=elastic needs both kinds in every stage.",
                hint=f"Use fewer stages, or other layers for them (engine.env.{PARTITION}), or kv=static.",
            )


def _server(draft: Draft, notes: list[Note]) -> str:
    """The module that serves."""
    if draft.device != "cpu":
        return "sglang.launch_server"
    why = "SGLang's own server; its processes are forked from one that has imported SGLang"
    notes.append(Note(setting="engine.argv", value=f"-m {_FORKING_SERVER}", why=why))
    return _FORKING_SERVER


def _common_env(draft: Draft, model: ModelPlan) -> dict[str, str]:
    env = {
        # kvlaunch's plugin alone: others could patch what the elastic cache relies on.
        "SGLANG_PLUGINS": "kvlaunch",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # SGLang's modules warn of every kind of kernel that this device does not have.
        "PYTHONWARNINGS": "ignore",
    }
    if draft.topology.nnodes == 1:
        # Ranks of one host meet on the loopback, whatever the host's name resolves to.
        env |= {"SGLANG_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    else:
        env |= {
            "SGLANG_HOST_IP": LOCAL_ADDR,
            "GLOO_SOCKET_IFNAME": LOCAL_INTERFACE,
            "NCCL_SOCKET_IFNAME": LOCAL_INTERFACE,
        }
    if model.path.startswith("/"):
        env["HF_HUB_OFFLINE"] = "1"
    return env


def _cpu_env(draft: Draft, notes: list[Note]) -> dict[str, str]:
    """Threads of the ranks on this node, and no NCCL: the CUDA build of torch would bring one, for CPU tensors too."""
    local, cpus = draft.topology.ranks_per_node, draft.host.cpus
    threads = max(1, cpus // local)
    env = {"OMP_NUM_THREADS": str(threads)}
    notes.append(Note(setting="engine.env.OMP_NUM_THREADS", value=str(threads), why=f"{cpus} CPUs over {local} ranks"))
    if draft.topology.world_size > 1:
        env["SGLANG_NCCL_SO_PATH"] = "/nonexistent/kvlaunch-no-nccl"
    if (ranks := draft.topology.world_size) > draft.host.numa_nodes:
        # SGLang counts the ranks of all nodes, and takes the entries by a rank's place on its own.
        env[BIND] = "|".join(_cpus_of(rank, local, cpus) for rank in range(local))
        why = (
            f"{ranks} ranks are more than {draft.host.numa_nodes} NUMA node(s), and SGLang refuses those without a list"
        )
        notes.append(Note(setting=f"engine.env.{BIND}", value=env[BIND], why=why))
    return env


def _cpus_of(rank: int, ranks: int, cpus: int) -> str:
    """An equal share of the CPUs, `4-7`; one CPU where there are more ranks than CPUs."""
    first, last = rank * cpus // ranks, (rank + 1) * cpus // ranks - 1
    return f"{first}-{last}" if last > first else str(first)
