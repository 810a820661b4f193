"""A limit that changes while real SGLang serves: on every rank at the same step, kept, and lifted again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvlaunch.errors import ConfigError
from tests.engines.harness import ALIKE, Engine, Load, kvlaunch, launch, prefix_cache, prompts, small, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

RETRACTED = "sglang:num_retracted_requests_total"
NEW_TOKENS = 64


def limit(engine: Engine, size: str) -> list[dict[str, Any]]:
    """`kvlaunch limit SIZE`; what each rank says then."""
    done = kvlaunch("limit", size, engine.run, "--json")
    assert done.returncode == 0, done.stderr
    ranks: list[dict[str, Any]] = json.loads(done.stdout)["ranks"]
    return ranks


@pytest.mark.supports("a limit changed while it serves (`kvlaunch limit`)")
@pytest.mark.parametrize(
    ("shape", "block_size", "radix"),
    [(("tp=1", "pp=2"), 1, True), (("tp=2", "pp=2"), 16, True), pytest.param(("pp=2",), 4, False, marks=ALIKE)],
)
def test_a_limit_lowered_under_load_is_kept_on_every_rank_and_lifted_again(
    shape: tuple[str, ...], block_size: int, radix: bool
) -> None:
    engine_args = ("engine.args.chunked_prefill_size=128", "engine.args.schedule_conservativeness=0.1")
    cache = ("kv.cache.idle_s=2", prefix_cache("sglang", on=radix), f"kv.block_size={block_size}")
    texts = [text * 2 for text in prompts(24)]
    with launch("engine=sglang", "kv.reserve=32MiB", *shape, *cache, *engine_args) as engine:
        before = engine.complete_all(prompts(24))
        with Load(engine, texts, NEW_TOKENS) as load:
            load.another_round()
            used, page = min(load.peak), engine.page_bytes()
            wanted = int(0.4 * used)
            limits = [rank["limit_bytes"] for rank in limit(engine, str(wanted))]
            assert len(set(limits)) == 1
            assert wanted - max(page) < limits[0] <= wanted
            # Requests are retracted one step after another; beyond the limit a batch's last request may grow, and pages
            # may be held by a few of their tokens.
            slack = 4 * max(page) + limits[0] // 4
            assert limits[0] + slack < 0.7 * used, "the limit is none: this test would prove nothing"
            wait_until(lambda: max(engine.resident_bytes()) <= limits[0] + slack, 60, f"limit {limits}, used {used}")
            load.another_round()
            assert max(load.peak) <= limits[0] + slack
            assert engine.metric(RETRACTED) > 0
            assert {rank["limit_bytes"] for rank in limit(engine, "none")} == {None}
            wait_until(lambda: min(engine.resident_bytes()) > limits[0] + slack, 60, "the memory is used again")
        assert load.rounds
        assert all(lengths == [NEW_TOKENS] * len(texts) for lengths in load.rounds)
        wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
        assert engine.complete_all(prompts(24)) == before
        assert engine.process.poll() is None
        for rank in range(len(page)):
            assert "leak" not in engine.paths.rank_log(rank).read_text(errors="replace")


def test_a_limit_that_is_none_is_refused() -> None:
    with launch(*small("sglang")) as engine:
        for size, says in (("1", "less than a page"), ("0", "less than a page"), ("many", "many")):
            done = kvlaunch("limit", size, engine.run)
            assert done.returncode == ConfigError.exit_code
            assert says in done.stderr
        assert engine.complete(prompts(1)[0])
