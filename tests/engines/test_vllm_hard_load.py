"""The elastic KV cache in real vLLM under what is hard on it: aborts, preemption, resets, several cache groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlaunch.errors import ConfigError
from tests.engines.harness import ALIKE, kvlaunch, launch, prompts, storm, wait_until
from tests.engines.hybrid_model import SLIDING_WINDOW, make_hybrid

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.supports("aborted requests give every page back, with `pp=2`")
@pytest.mark.supports("several steps in flight (asynchronous scheduling, overlap)")
@pytest.mark.parametrize(
    ("in_flight", "requests"),
    [(("pp=2",), 2000), (("pp=1", "engine.args.async_scheduling=true"), 500)],
    ids=["pipeline", "asynchronous"],
)
def test_an_abort_storm_with_several_steps_in_flight_loses_no_page(in_flight: tuple[str, ...], requests: int) -> None:
    # Every page goes back as soon as it may, so that one which went too early would be touched.
    eager = ("kv.ahead.low=0", "kv.ahead.high=0", "engine.args.enable_prefix_caching=false")
    with launch("engine=vllm", *in_flight, "kv.reserve=64MiB", *eager, fault="eager-unmap") as engine:
        before = engine.complete_all(prompts(8))
        storm(engine, requests)
        assert engine.complete_all(prompts(8)) == before
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        wait_until(lambda: engine.mapped_bytes() == engine.resident_bytes(), 10, "ps and smaps differ")
        completed = engine.metric("vllm:request_success_total")
        assert completed < requests * 0.75, f"{completed} requests ran to their end: the storm was none"
        assert engine.process.poll() is None


TIGHT = (
    "engine=vllm",
    "kv.cache.idle_s=1",
    "engine.args.max_model_len=640",
    "engine.args.max_num_batched_tokens=128",
    "engine.args.max_num_seqs=24",
)


@pytest.mark.supports("preemption (retraction) and chunked prefill, tokens as without")
@pytest.mark.parametrize(
    "in_flight",
    [
        ("pp=2", "kv.reserve=768KiB"),
        ("pp=1", "kv.reserve=1536KiB", "engine.args.async_scheduling=true"),
        pytest.param(("pp=1", "kv.reserve=1536KiB", "engine.args.async_scheduling=false"), marks=ALIKE),
    ],
    ids=["pipeline", "asynchronous", "one-step"],
)
def test_preemption_and_chunked_prefill_give_the_tokens_of_the_stock_engine(in_flight: tuple[str, ...]) -> None:
    """48 blocks a rank for 24 requests that want up to ten each."""
    overrides = (*TIGHT, *in_flight)
    texts = [text * 2 for text in prompts(24)]
    with launch(*overrides, "kv=static") as static:
        expected = static.complete_all(texts, max_tokens=96)
    with launch(*overrides, "kv=elastic", "engine.env.VLLM_SERVER_DEV_MODE=1") as elastic:
        assert elastic.complete_all(texts, max_tokens=96) == expected
        assert elastic.metric("vllm:num_preemptions_total") > 0, "nothing was preempted: this test would prove nothing"
        elastic.post("/reset_prefix_cache", {})
        wait_until(elastic.at_baseline, 30, f"resident {elastic.resident_bytes()}")
        assert elastic.complete_all(texts, max_tokens=96) == expected


@pytest.mark.supports("the prefix cache emptied on request gives its pages back")
def test_a_reset_of_the_prefix_cache_gives_its_pages_back() -> None:
    with launch(
        "engine=vllm", "kv.reserve=64MiB", "kv.cache.idle_s=3600", "engine.env.VLLM_SERVER_DEV_MODE=1"
    ) as engine:
        expected = engine.complete_all(prompts(24))
        wait_until(lambda: engine.mapped_bytes() == engine.resident_bytes(), 30, "ps and smaps differ")
        assert not engine.at_baseline(), "nothing was cached: this test would prove nothing"
        engine.post("/reset_prefix_cache", {})
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        assert engine.complete_all(prompts(24)) == expected


@pytest.mark.supports("`kv.cache.keep`, `kv.cache.idle_s`")
@pytest.mark.supports("a limit changed while it serves (`kvlaunch limit`)", refused=True)
def test_kept_cache_stays_and_the_rest_goes() -> None:
    with launch("engine=vllm", "kv.reserve=64MiB", "kv.cache.keep=1MiB", "kv.cache.idle_s=1") as engine:
        engine.complete_all(prompts(24), max_tokens=64)
        keep, page = 1024 * 1024, engine.page_bytes()[0]
        wait_until(lambda: engine.resident_bytes()[0] <= keep + 2 * page, 30, f"{engine.resident_bytes()} stay mapped")
        assert engine.resident_bytes()[0] >= keep
        refused = kvlaunch("limit", "2MiB", engine.run)
        assert refused.returncode == ConfigError.exit_code
        assert "engine=vllm" in refused.stderr


@pytest.mark.supports("sliding-window and full attention together")
def test_sliding_window_and_full_attention_together(tmp_path: Path) -> None:
    """Several cache groups share the pool; blocks that leave the window are freed while their request runs on."""
    model = make_hybrid(tmp_path)
    overrides = ("engine=vllm", f"model={model}", "pp=2", "kv.reserve=64MiB", "kv.cache.idle_s=1")
    texts = [text * 2 for text in prompts(24)]
    with launch(*overrides, "kv=static") as static:
        expected = static.complete_all(texts, max_tokens=2 * SLIDING_WINDOW)
    assert len({tuple(tokens) for tokens in expected}) > 12, "the model answers everything alike"
    with launch(*overrides, "kv=elastic") as elastic:
        assert elastic.complete_all(texts, max_tokens=2 * SLIDING_WINDOW) == expected
        assert elastic.complete_all(texts, max_tokens=2 * SLIDING_WINDOW) == expected
        wait_until(elastic.at_baseline, 30, f"resident {elastic.resident_bytes()}")
