"""Engine name -> recipe."""

from __future__ import annotations

from kvlaunch.config.schema import EngineName
from kvlaunch.engines.base import EngineRecipe


def recipe_for(engine: EngineName) -> EngineRecipe:
    """The recipe of an engine. Only that engine's module is imported."""
    match engine:
        case EngineName.vllm:
            from kvlaunch.engines.vllm.recipe import VLLMRecipe

            return VLLMRecipe()
        case EngineName.sglang:
            from kvlaunch.engines.sglang.recipe import SGLangRecipe

            return SGLangRecipe()
