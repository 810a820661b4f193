"""From a composed config to a LaunchPlan. Nothing is started, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvlaunch import env as contract
from kvlaunch.engines.base import Command, Draft, EngineRecipe
from kvlaunch.engines.registry import recipe_for
from kvlaunch.errors import PlanError
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.facts import ModelFacts, elastic_problem, load_facts
from kvlaunch.plan.fit import check_pp, check_tp
from kvlaunch.plan.host import CUDA_VISIBLE, HostFacts, declared_devices, too_few_devices, visible_devices
from kvlaunch.plan.ids import display_name
from kvlaunch.plan.kv import KVShape, blocks_per_page, plan_kv
from kvlaunch.plan.tiny import tiny_model_dir
from kvlaunch.plan.topology import LayerRange, Topology
from kvlaunch.plan.types import (
    KVPlan,
    LaunchPlan,
    ModelPlan,
    NodePlan,
    Note,
    RankPlan,
    RendezvousPlan,
    ServerPlan,
    StagePlan,
    TimeoutPlan,
)
from kvlaunch.plan.weights import weight_bytes

if TYPE_CHECKING:
    from kvlaunch.config.schema import LaunchConfig

Device = Literal["cpu", "cuda"]


def make_plan(config: LaunchConfig, *, run: str, host: HostFacts) -> LaunchPlan:
    """The plan of one run.

    Args:
        config: composed and validated; byte sizes are integers.
        run: the run's id, from `new_run_id`.
        host: facts of this machine, from `probe_host`. The plan may be for a machine with GPUs that this one does not
            have; `check_host` refuses to start it here.

    Raises:
        PlanError: the ranks cannot be placed, the model does not fit them, or the engine cannot do what was asked.
    """
    notes: list[Note] = []
    recipe = recipe_for(config.engine.name)
    topology = Topology(config.tp, config.pp, config.nnodes)
    rdzv = _rendezvous(config, run, host, notes)
    device = _device(config, topology, host, notes)
    facts = load_facts(config.model)
    draft = Draft(config=config, facts=facts, topology=topology, host=host, device=device)
    recipe.check(draft)
    check_tp(facts, topology.tp_size)
    check_pp(facts, topology.pp_size)
    _check_kv(config, facts, notes)
    split = recipe.layers(draft)
    shape = recipe.kv_shape(draft, split)
    kv = plan_kv(config.kv, shape, device)
    model = _model(config, facts)
    commands = _commands(recipe, draft, model, kv, shape)
    paths = RunPaths.of(run)
    return LaunchPlan(
        run=run,
        name=display_name(config),
        engine=config.engine.name.value,
        engine_python=config.engine.python or host.python,
        model=model,
        device=device,
        tp_size=topology.tp_size,
        pp_size=topology.pp_size,
        nnodes=topology.nnodes,
        world_size=topology.world_size,
        ranks=_ranks(draft, split, shape),
        stages=_stages(topology, paths),
        nodes=_nodes(topology, commands, paths),
        kv=kv,
        server=ServerPlan(host=config.server.host, port=config.server.port),
        rdzv=rdzv,
        max_restarts=config.max_restarts,
        timeouts=TimeoutPlan(
            ready_s=config.timeouts.ready_s,
            drain_s=config.timeouts.drain_s,
            term_s=config.timeouts.term_s,
            node_s=config.timeouts.node_s,
            hung_s=config.timeouts.hung_s,
        ),
        notes=(*notes, *_kv_notes(config, kv, shape), *commands[0].notes),
    )


def _device(config: LaunchConfig, topology: Topology, host: HostFacts, notes: list[Note]) -> Device:
    """What the ranks run on. Raises PlanError where CUDA_VISIBLE_DEVICES shows fewer GPUs than a node has ranks."""
    asked = config.device.name.value
    if asked == "cpu":
        return "cpu"
    declared = config.engine.env.get(CUDA_VISIBLE, host.cuda_visible_devices)
    seen = visible_devices(declared, host.gpus)
    if asked == "auto" and not seen:
        notes.append(Note(setting="device", value="cpu", why=_why_no_gpu(declared)))
        return "cpu"
    needed = topology.ranks_per_node
    if declared is not None and len(shown := declared_devices(declared)) < needed:
        raise too_few_devices(shown, needed, declared)
    if asked == "auto":
        notes.append(Note(setting="device", value="cuda", why=f"{len(seen)} GPU(s) are visible"))
    if len(seen) < needed:
        why = f"this machine shows {len(seen)} GPU(s) and a node needs {needed}: the plan is for another machine"
        notes.append(Note(setting="device", value="cuda", why=why))
    notes.append(Note(setting="engine.argv", value="device=cuda", why="no GPU has run this recipe yet"))
    return "cuda"


def _why_no_gpu(declared: str | None) -> str:
    return "no GPU was found" if declared is None else f"{CUDA_VISIBLE}={declared!r} shows no GPU"


def _check_kv(config: LaunchConfig, facts: ModelFacts, notes: list[Note]) -> None:
    problem = elastic_problem(facts)
    if problem is not None and config.kv.mode.value == "elastic":
        raise PlanError(f"kv=elastic: {problem}.", hint="Use kv=static.")
    if problem is not None:
        why = f"{facts.architecture} is not known: its bytes are computed as those of a plain decoder"
        notes.append(Note(setting="model.architecture", value=facts.architecture, why=why))
    if facts.quantization:
        why = f"stored as {facts.quantization}: bytes of weights are given for {facts.dtype}, an upper bound"
        notes.append(Note(setting="model.dtype", value=facts.dtype, why=why))


def _model(config: LaunchConfig, facts: ModelFacts) -> ModelPlan:
    if config.model.tiny:
        path = str(tiny_model_dir())
    else:
        path = config.model.path or config.model.name
        local = Path(path).expanduser()
        # The engine starts in another folder: a relative path would lead elsewhere.
        path = str(local.resolve()) if path.startswith(("~", ".", "/")) or local.is_dir() else path
    return ModelPlan(
        name=config.model.name,
        path=path,
        architecture=facts.architecture,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=facts.dtype,
        make_tiny=config.model.tiny,
    )


def _commands(recipe: EngineRecipe, draft: Draft, model: ModelPlan, kv: KVPlan, shape: KVShape) -> tuple[Command, ...]:
    return tuple(
        recipe.command(draft, node_rank=node_rank, model=model, kv=kv, shape=shape)
        for node_rank in range(draft.topology.nnodes)
    )


def _ranks(draft: Draft, split: tuple[LayerRange, ...], shape: KVShape) -> tuple[RankPlan, ...]:
    topology = draft.topology
    weights = weight_bytes(draft.facts, topology, split)
    ranks = []
    for rank in range(topology.world_size):
        pp_rank, tp_rank = topology.coordinates(rank)
        local_rank = topology.local_rank(rank)
        first, last = split[pp_rank]
        ranks.append(
            RankPlan(
                global_rank=rank,
                pp_rank=pp_rank,
                tp_rank=tp_rank,
                node_rank=topology.node(rank),
                local_rank=local_rank,
                device="cpu" if draft.device == "cpu" else f"cuda:{local_rank}",
                layers=(first, last),
                weight_bytes=weights[pp_rank],
                kv_bytes_per_token=(last - first + 1) * shape.block_bytes // shape.block_size,
                kv_bytes_per_block=shape.stage_layers[pp_rank] * shape.block_bytes,
            )
        )
    return tuple(ranks)


def _stages(topology: Topology, paths: RunPaths) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            pp_rank=pp_rank,
            leader=topology.leader(pp_rank),
            ranks=topology.stage(pp_rank),
            node_rank=topology.node(topology.leader(pp_rank)),
            endpoint=f"ipc://{paths.listener_socket(pp_rank)}",
            network=topology.nnodes > 1,
        )
        for pp_rank in range(topology.pp_size)
    )


def _nodes(topology: Topology, commands: tuple[Command, ...], paths: RunPaths) -> tuple[NodePlan, ...]:
    return tuple(
        NodePlan(
            node_rank=node_rank,
            ranks=topology.node_ranks(node_rank),
            argv=command.argv,
            env={
                **command.env,
                contract.RUN_ID: paths.run,
                contract.RUN_DIR: str(paths.root),
                contract.NODE_RANK: str(node_rank),
                contract.WORLD_SIZE: str(topology.world_size),
            },
            # The engine finds the secret in the run's folder, and need not hand it on to all that it starts.
            unset=(*command.unset, contract.SECRET),
        )
        for node_rank, command in enumerate(commands)
    )


def _rendezvous(config: LaunchConfig, run: str, host: HostFacts, notes: list[Note]) -> RendezvousPlan:
    rdzv = config.rdzv
    local_addr = config.local_addr
    endpoint = rdzv.endpoint
    if endpoint is None:
        if config.nnodes > 1:
            raise PlanError(
                f"nnodes={config.nnodes} needs rdzv.endpoint: the nodes must know where to meet.",
                hint="Give the same one on every node: the first node's address and a free port, "
                "for example rdzv.endpoint=10.0.0.1:29500",
            )
        endpoint = "localhost:0"
        notes.append(Note(setting="rdzv.endpoint", value=endpoint, why="one node meets itself on any free port"))
    if config.nnodes > 1 and local_addr is None:
        local_addr = host.local_addr
        why = f"this host's address on the way to {endpoint}" if local_addr else f"{endpoint} is not known here now"
        notes.append(Note(setting="local_addr", value=local_addr or "found at start", why=why))
    return RendezvousPlan(
        backend=rdzv.backend.value,
        endpoint=endpoint,
        id=rdzv.id or run,
        timeout_s=rdzv.timeout_s,
        node_rank=config.node_rank,
        local_addr=local_addr,
        secret_file=str(Path(rdzv.secret_file).expanduser().absolute()) if rdzv.secret_file else None,
    )


def _kv_notes(config: LaunchConfig, kv: KVPlan, shape: KVShape) -> list[Note]:
    page = kv.blocks_per_page * shape.block_bytes
    least = blocks_per_page(shape.block_bytes // shape.strips_per_layer, kv.granularity, 0)
    why = f"the least whole number of blocks whose bytes in each layer ({page}) are a multiple of {kv.granularity}"
    if config.kv.page:
        why += f" and reach kv.page={config.kv.page}"
    elif kv.blocks_per_page > least:
        why = (
            f"{page} bytes in each layer: smaller pages of kv.reserve could need more mappings than the kernel allows "
            "a process (vm.max_map_count)"
        )
    notes = [Note(setting="kv.blocks_per_page", value=str(kv.blocks_per_page), why=why)]
    if kv.reserve_bytes != int(config.kv.reserve):
        why = f"whole pages within kv.reserve={int(config.kv.reserve)}, on the largest rank"
        notes.append(Note(setting="kv.reserve_bytes", value=str(kv.reserve_bytes), why=why))
    return notes
