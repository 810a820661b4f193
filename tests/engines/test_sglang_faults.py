"""What goes wrong on a rank of real SGLang: a forgotten stage, a failed map, a rank that raises."""

from __future__ import annotations

import re

import pytest

from kvlaunch.errors import EngineError
from tests.engines.harness import launch, prefix_cache, prompts, small

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = small("sglang")


@pytest.mark.supports("a rank that was forgotten crashes at once (`kv.guard`)")
def test_a_forgotten_stage_crashes_under_the_guard() -> None:
    """The proof that the guard works: stage 1 agrees to every map and maps nothing beyond the first page."""
    with launch(*SMALL, "tp=1", "pp=2", fault="unmapped,stage=1") as engine:
        with pytest.raises(OSError):
            engine.complete_all(prompts(24))
        assert engine.process.wait(60) == EngineError.exit_code
        log = engine.paths.rank_log(1).read_text(errors="replace")
    assert "rank 1" in "".join(engine.stderr)
    assert re.search("SIGSEGV|[Ss]egfault|Segmentation fault", log)


@pytest.mark.supports("a map that fails on one rank", how="the engine ends and names the rank")
def test_a_rank_without_memory_ends_the_engine_and_is_named() -> None:
    """The ranks of SGLang count alike and schedule in step: one that cannot keep up is an error, and no guess."""
    fault = "map-fails,rank=1,after=1,times=1000000"
    eager = ("kv.ahead.low=0", "kv.ahead.high=0", prefix_cache("sglang", on=False))
    with launch(*SMALL, "tp=2", "pp=1", *eager, fault=fault) as engine:
        with pytest.raises(OSError):
            engine.complete_all(prompts(24), max_tokens=64)
        assert engine.process.wait(60) == EngineError.exit_code
    said = "".join(engine.stderr)
    assert "rank 1 failed first" in said
    assert "injected: no memory for this page" in said
