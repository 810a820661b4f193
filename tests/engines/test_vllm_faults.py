"""What goes wrong on a rank of real vLLM: a forgotten stage, a failed map, a hanging listener, a rank that raises."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from kvlaunch.errors import EngineError
from tests.engines.harness import SMALL, Engine, kvlaunch, launch, prompts, stock_answers, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def scheduler_log(engine: Engine) -> str:
    return engine.paths.engine_log.read_text(errors="replace")


@pytest.mark.supports("a rank that was forgotten crashes at once (`kv.guard`)")
def test_a_forgotten_stage_crashes_under_the_guard() -> None:
    """The proof that the guard works: stage 1 agrees to every map and maps nothing. It does not get to be ready."""
    out = kvlaunch(
        "up", "model=tiny-qwen3", "server.port=0", *SMALL, "tp=1", "pp=2",
        timeout=240, KVLAUNCH_TEST_FAULT="unmapped,stage=1",
    )  # fmt: skip
    assert out.returncode == EngineError.exit_code
    assert "rank 1" in out.stderr
    log = re.search(r"The whole story: (\S+/rank1\.log)", out.stderr)
    assert log is not None, out.stderr
    assert re.search("SIGSEGV|[Ss]egfault|Segmentation fault", Path(log.group(1)).read_text(errors="replace"))


@pytest.mark.supports("a map that fails on one rank", how="rolled back on all; the engine serves on")
def test_a_failed_map_is_rolled_back_everywhere_and_the_engine_serves_on() -> None:
    """Rank 3 (stage 1) refuses three maps, under load and alone."""
    expected = stock_answers("vllm", tp=2, pp=2, prefix_caching=True)[0]
    fault = "map-fails,rank=3,after=3,times=6"
    with launch(*SMALL, "tp=2", "pp=2", "kv.ahead.low=0", "kv.ahead.high=0", fault=fault) as engine:
        assert engine.complete_all(prompts(24)) == expected
        log = scheduler_log(engine)
        assert "rank 3" in log
        assert "injected: no memory for this page" in log
        wait_until(lambda: len(set(engine.mapped_bytes())) == 1, 10, "the ranks differ in what they have mapped")
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        assert engine.complete_all(prompts(24)) == expected


def test_a_listener_that_hangs_is_an_error_within_its_deadline_and_the_engine_serves_on() -> None:
    fault = "stall,rank=2,after=3,seconds=6"
    with launch(
        *SMALL, "tp=2", "pp=2", "kv.ahead.low=0", "kv.ahead.high=0", "kv.commit_timeout_s=2", fault=fault
    ) as engine:
        started = time.monotonic()
        first = engine.complete_all(prompts(8))
        assert time.monotonic() - started > 2, "nothing hung: this test would prove nothing"
        log = scheduler_log(engine)
        assert "stage 1" in log or "rank 2" in log
        assert engine.complete_all(prompts(8)) == first
        wait_until(lambda: len(set(engine.mapped_bytes())) == 1, 20, "the ranks differ in what they have mapped")
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")


def test_an_option_that_cannot_work_is_refused_by_name() -> None:
    out = kvlaunch("plan", "model=tiny-qwen3", *SMALL, "engine.args.enable_sleep_mode=true")
    assert out.returncode != 0
    assert "enable_sleep_mode" in out.stderr
    assert "kv=static" in out.stderr
