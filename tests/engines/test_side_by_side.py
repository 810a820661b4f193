"""One vLLM and one SGLang on one machine, each from its own environment, started by one kvlaunch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.harness import launch, prompts, small, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENTS = Path(__file__).parents[2] / ".venv"


def test_both_engines_serve_at_once() -> None:
    python = ENVIRONMENTS / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment of vLLM: make env ENGINE=vllm")
    with (
        launch(*small("vllm"), f"engine.python={python}") as vllm,
        launch(*small("sglang")) as sglang,
    ):
        both = (vllm, sglang)
        alone = [engine.complete_all(prompts(8)) for engine in both]
        assert [engine.complete_all(prompts(8)) for engine in both] == alone
        assert {engine.ps()["engine"] for engine in both} == {"vllm", "sglang"}
        for engine in both:
            wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        assert sglang.stop() == 0
        assert vllm.complete_all(prompts(8)) == alone[0]
