"""What an engine brings to a plan: an `EngineRecipe`, pure, free of any import of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvlaunch.plan.types import Note

if TYPE_CHECKING:
    from kvlaunch.config.schema import LaunchConfig
    from kvlaunch.plan.facts import ModelFacts
    from kvlaunch.plan.host import HostFacts
    from kvlaunch.plan.kv import KVShape
    from kvlaunch.plan.topology import LayerRange, Topology
    from kvlaunch.plan.types import KVPlan, ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan in the making: what a recipe may look at before the KV cache is laid out."""

    config: LaunchConfig
    facts: ModelFacts
    topology: Topology
    host: HostFacts
    device: Literal["cpu", "cuda"]

    @property
    def args(self) -> dict[str, Any]:
        """`engine.args` with the options' names spelled with underscores."""
        return {name.lstrip("-").replace("-", "_"): value for name, value in self.config.engine.args.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How one node's engine process is started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """Set on top of the inherited environment."""
    unset: tuple[str, ...] = ()
    """Removed from the inherited environment."""
    notes: tuple[Note, ...] = ()


MASTER_ADDR = "${MASTER_ADDR}"
MASTER_PORT = "${MASTER_PORT}"
MASTER = "${MASTER}"
"""The two as HOST:PORT, an IPv6 address in brackets."""
LOCAL_ADDR = "${LOCAL_ADDR}"
"""Address by which the other nodes reach this one."""
LOCAL_INTERFACE = "${LOCAL_INTERFACE}"
"""The network interface that has it. These stand in a plan's argv and env for what the nodes learn when they meet."""


class EngineRecipe(ABC):
    """One engine's part of a plan, for one tested window of versions.

    The planner calls `check`, then `layers` and `kv_shape`, then `command` once for each node. Every method raises
    PlanError for what the engine cannot do, naming the option.
    """

    name: ClassVar[str]
    versions: ClassVar[str]
    """Tested window as a PEP 440 specifier."""

    @abstractmethod
    def check(self, draft: Draft) -> None:
        """Refuse what this engine, or its elastic KV cache, cannot do."""

    @abstractmethod
    def layers(self, draft: Draft) -> tuple[LayerRange, ...]:
        """Layers of each stage, by the engine's own rule."""

    @abstractmethod
    def kv_shape(self, draft: Draft, split: tuple[LayerRange, ...]) -> KVShape:
        """Blocks of the KV cache."""

    @abstractmethod
    def command(self, draft: Draft, *, node_rank: int, model: ModelPlan, kv: KVPlan, shape: KVShape) -> Command:
        """argv and environment of one node's engine process, and the choices made in it."""


def merge_env(
    own: Mapping[str, str], users: Mapping[str, str | None], unset: Iterable[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Environment of an engine process: the recipe's, then the user's `engine.env`, where null removes a variable.

    Returns:
        What to set on top of the inherited environment, and what to remove from it.
    """
    env = {**own, **{name: value for name, value in users.items() if value is not None}}
    removed = {name for name, value in users.items() if value is None}
    env = {name: value for name, value in env.items() if name not in removed}
    return env, tuple(sorted(removed | {name for name in unset if name not in env}))
