"""The elastic KV cache in real SGLang under what is hard on it: aborts, retraction, chunks, flushes, windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlaunch.errors import KVCommitError
from kvlaunch.plan.kv import capacity_tokens
from tests.engines.harness import ALIKE, Load, kvlaunch, launch, prefix_cache, prompts, small, storm, wait_until
from tests.engines.hybrid_model import SLIDING_WINDOW, make_mellum

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = 600
RETRACTED = "sglang:num_retracted_requests_total"


@pytest.mark.supports("aborted requests give every page back, with `pp=2`")
def test_an_abort_storm_under_pipeline_parallelism_loses_no_page() -> None:
    # Every page goes back as soon as it may, so that one which went too early would be touched.
    eager = ("kv.ahead.low=0", "kv.ahead.high=0", prefix_cache("sglang", on=False))
    with launch(*small("sglang"), "tp=1", "pp=2", *eager, fault="eager-unmap") as engine:
        before = engine.complete_all(prompts(8))
        storm(engine, REQUESTS)
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        wait_until(lambda: engine.mapped_bytes() == engine.resident_bytes(), 10, "ps and smaps differ")
        assert engine.complete_all(prompts(8)) == before
        assert engine.metric("sglang:num_aborted_requests_total") > REQUESTS / 10, "the storm was none"
        assert engine.process.poll() is None


TIGHT = (
    "engine=sglang",
    "pp=2",
    "kv.reserve=1280KiB",
    prefix_cache("sglang", on=False),  # with it, and retractions, stock SGLang's own tokens vary
    "engine.args.chunked_prefill_size=128",
    "engine.args.schedule_conservativeness=0.1",
)
"""2,560 tokens for 24 requests that want more than twice as many together."""


@pytest.mark.supports("preemption (retraction) and chunked prefill, tokens as without")
@pytest.mark.supports("several steps in flight (asynchronous scheduling, overlap)")
@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
def test_retraction_and_chunked_prefill_give_the_tokens_of_stock_sglang(page_size: int, overlap: bool) -> None:
    overrides = (
        *TIGHT,
        f"kv.block_size={page_size}",
        f"engine.args.disable_overlap_schedule={str(not overlap).lower()}",
    )
    texts = [text * 2 for text in prompts(24)]
    with launch(*overrides, "kv=static") as static:
        expected = static.complete_all(texts, max_tokens=96)
        static.flush()
        assert static.complete_all(texts, max_tokens=96) == expected, "stock SGLang varies by itself"
        assert static.metric(RETRACTED) > 0, "nothing was retracted: this test would prove nothing"
    with launch(*overrides, "kv=elastic") as elastic:
        assert elastic.complete_all(texts, max_tokens=96) == expected
        assert elastic.metric(RETRACTED) > 0
        wait_until(elastic.at_baseline, 30, f"resident {elastic.resident_bytes()}")
        assert elastic.complete_all(texts, max_tokens=96) == expected


@pytest.mark.supports("the prefix cache emptied on request gives its pages back")
def test_a_flush_gives_the_cached_pages_back_and_the_kept_ones_stay() -> None:
    with launch(*small("sglang"), "tp=2", "kv.cache.idle_s=3600", "kv.block_size=4") as engine:
        expected = engine.complete_all(prompts(24))
        wait_until(lambda: engine.mapped_bytes() == engine.resident_bytes(), 30, "ps and smaps differ")
        assert not engine.at_baseline(), "nothing was cached: this test would prove nothing"
        engine.flush()
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        assert engine.complete_all(prompts(24)) == expected


@pytest.mark.supports("`kv.cache.keep`, `kv.cache.idle_s`")
def test_kept_cache_stays_and_the_rest_goes() -> None:
    # Pages of SGLang as large as those of memory: with smaller ones, kept tokens share theirs with free ones.
    keep = ("kv.cache.keep=1MiB", "kv.cache.idle_s=1", "kv.block_size=32")
    with launch("engine=sglang", "kv.reserve=64MiB", *keep) as engine:
        engine.complete_all(prompts(24), max_tokens=64)
        kept, page = 1024 * 1024, engine.page_bytes()[0]
        wait_until(lambda: engine.resident_bytes()[0] <= kept + 2 * page, 30, "the rest stays mapped")
        assert engine.resident_bytes()[0] >= kept - 4 * page


@pytest.mark.supports("more tokens than slots go through, and few pages are ever touched")
def test_memory_follows_the_live_tokens_however_many_went_through() -> None:
    """500,000 tokens through 400,000 slots, handed out first in, first out by stock SGLang, which has touched all then.

    Touched are pages that ever had memory: at most 1.5 times as many as the live tokens need at their peak.
    """
    with launch("engine=sglang", "kv.reserve=391MiB", prefix_cache("sglang", on=False)) as engine:
        kv, rank = engine.plan.kv, engine.plan.ranks[0]
        assert capacity_tokens(kv) >= 400_000
        texts = [text * 4 for text in prompts(24)]
        live = sum(len(text) + 8 for text in texts)
        for _ in range(-(-500_000 // live)):
            engine.complete_all(texts, max_tokens=8)
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        touched = engine.kv_stats()["touched_pages"]
        needed = live * rank.kv_bytes_per_token / engine.page_bytes()[0]
        assert touched <= 1.5 * needed, (touched, needed)
        assert touched > 0.5 * needed, "the requests were not live together: this test would prove nothing"


@pytest.fixture(scope="module")
def mellum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mellum(tmp_path_factory.mktemp("mellum"))


@pytest.mark.supports("sliding-window and full attention together")
@pytest.mark.parametrize(
    ("shape", "radix", "page_size"),
    [
        pytest.param(("pp=1",), True, 1, marks=ALIKE),
        (("pp=2",), True, 1),
        (("pp=2", "engine.args.chunked_prefill_size=8192"), False, 4),  # no chunks: they would end at borders of pages
    ],
    ids=["one-rank", "pipeline", "pipeline-plain"],
)
def test_sliding_window_and_full_attention_together(
    mellum: Path, shape: tuple[str, ...], radix: bool, page_size: int
) -> None:
    """SGLang keeps two pools; slots that leave the window are freed in one of them while their request runs on."""
    eager = ("kv.cache.idle_s=1", "kv.ahead.low=0", "kv.ahead.high=0")
    model = f"model={mellum}"
    overrides = ("engine=sglang", model, *shape, "kv.reserve=64MiB", *eager, prefix_cache("sglang", on=radix))
    texts, new_tokens = [text * 2 for text in prompts(12)], SLIDING_WINDOW + 32
    assert min(map(len, texts)) > SLIDING_WINDOW
    # SGLang itself is asked with page_size 1, and for fewer tokens than it has slots: else it reads wrong ones (see
    # kvlaunch.engines.sglang.attention).
    with launch(*overrides, "kv=static") as static:
        expected = [static.complete_all(texts, new_tokens) for _ in range(2)]
    assert len({tuple(tokens) for tokens in expected[0]}) > 6, "the model answers everything alike"
    with launch(*overrides, "kv=elastic", f"kv.block_size={page_size}") as elastic:
        assert elastic.plan.kv.guard
        wait_until(elastic.at_baseline, 30, f"resident {elastic.resident_bytes()}")
        assert [elastic.complete_all(texts, new_tokens) for _ in range(2)] == expected
        # Two of eight layers keep all tokens, and the others those of the windows.
        live = sum(map(len, texts)) + len(texts) * new_tokens // 2
        with Load(elastic, texts, new_tokens) as load:
            load.until_resident([0.25 * live * rank.kv_bytes_per_token for rank in elastic.plan.ranks])
        wait_until(elastic.at_baseline, 30, f"resident {elastic.resident_bytes()}")
        wait_until(lambda: elastic.mapped_bytes() == elastic.resident_bytes(), 10, "ps and smaps differ")
        assert elastic.complete_all(texts, new_tokens) == expected[0]
        refused = kvlaunch("limit", "2MiB", elastic.run)
        assert refused.returncode == KVCommitError.exit_code
        assert "sliding window" in refused.stderr
        assert elastic.process.poll() is None
        for rank in elastic.plan.ranks:
            assert "leak" not in elastic.paths.rank_log(rank.global_rank).read_text(errors="replace")


def test_what_left_the_window_gives_its_memory_back_while_its_request_runs_on(mellum: Path) -> None:
    texts, new_tokens = prompts(4), 10 * SLIDING_WINDOW
    eager = ("kv.ahead.low=0", "kv.ahead.high=0", prefix_cache("sglang", on=False))
    with launch("engine=sglang", f"model={mellum}", "kv.reserve=64MiB", *eager) as engine:
        kept = sum(map(len, texts)) + len(texts) * new_tokens
        everything = kept * engine.plan.ranks[0].kv_bytes_per_token
        with Load(engine, texts, new_tokens) as load:
            load.another_round()
        assert load.peak[0] > 0.25 * everything, (load.peak, everything)
        assert load.peak[0] < 0.6 * everything, (load.peak, everything)
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
