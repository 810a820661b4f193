"""SGLang in a plan: not yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvlaunch.engines.base import Command, Draft, EngineRecipe
from kvlaunch.errors import PlanError

if TYPE_CHECKING:
    from kvlaunch.plan.kv import KVShape
    from kvlaunch.plan.topology import LayerRange
    from kvlaunch.plan.types import KVPlan, ModelPlan


class SGLangRecipe(EngineRecipe):
    name = "sglang"
    versions = ""

    def check(self, draft: Draft) -> None:
        _refuse()

    def layers(self, draft: Draft) -> tuple[LayerRange, ...]:
        _refuse()

    def kv_shape(self, draft: Draft, split: tuple[LayerRange, ...]) -> KVShape:
        _refuse()

    def command(self, draft: Draft, *, node_rank: int, model: ModelPlan, kv: KVPlan, shape: KVShape) -> Command:
        _refuse()


def _refuse() -> NoReturn:
    raise PlanError("engine=sglang: the SGLang engine is not supported yet.", hint="Use engine=vllm.")
