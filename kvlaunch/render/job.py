"""What is rendered: a plan, the words that make it again on every node, and what a node has to offer for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlaunch.config.groups import Groups
from kvlaunch.config.origins import DEFAULT
from kvlaunch.config.overrides import parse
from kvlaunch.config.schema import DeviceName
from kvlaunch.config.values import unquote
from kvlaunch.errors import ConfigError
from kvlaunch.launch.launcher import END_MARGIN_S
from kvlaunch.launch.supervisor import AGENT_MARGIN_S
from kvlaunch.plan.host import probe_host
from kvlaunch.plan.planner import make_plan

if TYPE_CHECKING:
    from kvlaunch.config.compose import Composed
    from kvlaunch.plan.types import LaunchPlan

GIB = 1 << 30
RANK_BYTES = 4 * GIB
"""What the process of a rank takes beside its weights and its KV cache: libraries, buffers, activations."""
SHARED_BYTES = 4 * GIB
"""For a node's other processes: the server, the scheduler, the agent, the launcher."""
RANK_CPUS = {"cpu": 8, "cuda": 4}
"""On the GPU a rank's process launches kernels; on the CPU it computes."""
SHARED_CPUS = 2

_ALONE = ("node_rank", "local_addr")
"""Settings of one node, which one command for all of them cannot carry."""
_PATHS = ("model.path", "engine.python", "rdzv.secret_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan for machines that are not this one."""

    plan: LaunchPlan
    words: tuple[str, ...]
    """Overrides that make the plan, the same on every node. Local paths are absolute."""
    config_dir: str | None
    """--config-dir, absolute."""
    cpus: int
    """Of a node."""
    memory_bytes: int
    """Of a node, what lies in /dev/shm included."""
    default_host: bool
    """server.host was left to kvlaunch."""
    given: frozenset[str]
    """Of rdzv.endpoint, rdzv.id and rdzv.secret_file those that were set."""

    @property
    def ranks_per_node(self) -> int:
        return _ranks_per_node(self.plan)

    @property
    def needs_secret(self) -> bool:
        """Its nodes command each other's KV listeners, and no file holds their secret."""
        plan = self.plan
        return plan.nnodes > 1 and plan.kv.mode == "elastic" and "rdzv.secret_file" not in self.given

    @property
    def grace_s(self) -> int:
        """Whole seconds within which the run ends by itself after SIGTERM: drained, or its processes killed."""
        limits = self.plan.timeouts
        return math.ceil(limits.drain_s + limits.term_s + AGENT_MARGIN_S + END_MARGIN_S)

    @property
    def shm_bytes(self) -> int:
        """Shared memory through which the processes of a node pass tensors and messages."""
        return _shm_bytes(self.ranks_per_node)

    @property
    def command(self) -> tuple[str, ...]:
        """What every node runs."""
        own = ("--config-dir", self.config_dir) if self.config_dir else ()
        return ("kvlaunch", "up", *own, *self.words)

    @property
    def summary(self) -> str:
        """One line for a person."""
        plan = self.plan
        nodes = f"{plan.nnodes} node{'' if plan.nnodes == 1 else 's'}"
        return (
            f"{plan.model.name} on {plan.engine}, device {plan.device}: tp {plan.tp_size} x pp {plan.pp_size} = "
            f"{plan.world_size} rank{'' if plan.world_size == 1 else 's'}, {self.ranks_per_node} on each of {nodes}"
        )


def make_job(
    composed: Composed,
    typed: Sequence[str],
    *,
    config_dir: Path | None = None,
    cpus: int | None = None,
    memory_bytes: int | None = None,
) -> Job:
    """Plan for a cluster.

    Args:
        composed: what `typed` composes to.
        typed: the overrides.
        cpus, memory_bytes: of a node, where the user knows better.

    Raises:
        ConfigError: a setting belongs to one node, or depends on the machine that the plan is made on.
        PlanError: it cannot be placed, or does not fit the model.
    """
    config, container = composed.config, composed.container
    for key in _ALONE:
        if container.get(key) is not None:
            raise ConfigError(
                f"{key}={container[key]} is one node's own setting, and what is rendered runs the same command on all.",
                hint="Leave it out: the cluster tells each node.",
            )
    if config.device.name is DeviceName.auto:
        raise ConfigError(
            "device=auto goes by the machine that it is asked on, and that is not the one that will serve.",
            hint="Say what the nodes have: device=cuda or device=cpu",
        )
    rdzv = config.rdzv
    given = {f"rdzv.{key}" for key in ("endpoint", "id", "secret_file") if container["rdzv"].get(key) is not None}
    if rdzv.endpoint is None and config.nnodes > 1:
        rdzv = replace(rdzv, endpoint="first-node:29400")  # the cluster will tell; the plan is only read here
    plan = make_plan(replace(config, rdzv=rdzv), run="render", host=replace(probe_host({}), gpus=0))
    local = _ranks_per_node(plan)
    return Job(
        plan=plan,
        words=_portable(composed, typed, config_dir),
        config_dir=str(config_dir.expanduser().absolute()) if config_dir else None,
        cpus=cpus or SHARED_CPUS + RANK_CPUS[plan.device] * local,
        memory_bytes=memory_bytes or _node_bytes(plan) + _shm_bytes(local),
        default_host=composed.origin("server.host") == DEFAULT,
        given=frozenset(given),
    )


def _ranks_per_node(plan: LaunchPlan) -> int:
    return max(len(node.ranks) for node in plan.nodes)


def _shm_bytes(ranks: int) -> int:
    return max(2, ranks) * GIB


def _node_bytes(plan: LaunchPlan) -> int:
    """Host memory of the node that takes most, in whole GiB. An elastic KV cache counts in full: it may grow so far."""
    most = 0
    for node in plan.nodes:
        ranks = [plan.ranks[rank] for rank in node.ranks]
        nbytes = SHARED_BYTES + sum(RANK_BYTES + rank.weight_bytes for rank in ranks)
        if plan.device == "cpu":
            nbytes += plan.kv.num_blocks * sum(rank.kv_bytes_per_block for rank in ranks)
        most = max(most, nbytes)
    return math.ceil(most / GIB) * GIB


def _portable(composed: Composed, typed: Sequence[str], config_dir: Path | None) -> tuple[str, ...]:
    """The overrides with relative paths made absolute: the command may run in another folder."""
    groups = Groups.at(config_dir)
    words = []
    for text in typed:
        override = parse(text, groups)
        raw = unquote(override.raw or "")[0]
        if override.key == "model" and raw[:1] != "~" and composed.origin("model.path") == text:
            path = composed.config.model.path or raw
            words.append(f"model={path}" if path.startswith("/") else text)
        elif override.key in _PATHS and raw.startswith(("./", "../")):
            words.append(f"{override.key}={Path(raw).absolute()}")
        else:
            words.append(text)
    return tuple(words)
