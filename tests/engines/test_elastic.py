"""The elastic KV cache in real engines: tokens of the stock engine, memory that follows the load, on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.engines.harness import PROMPTS, Engine, Load, launch, overrides_of, stock_answers, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]


@dataclass(frozen=True)
class Case:
    engine: str
    tp: int
    pp: int
    prefix_caching: bool

    def __str__(self) -> str:
        return f"{self.engine}-tp{self.tp}-pp{self.pp}-{'prefix' if self.prefix_caching else 'plain'}"


@dataclass(frozen=True)
class Pair:
    """A running elastic engine, and what the stock one answered before under the same topology."""

    case: Case
    elastic: Engine
    expected: list[list[list[int]]]


CASES = [
    pytest.param(Case(engine, tp, pp, prefix), marks=mark)
    for engine, mark in (("vllm", pytest.mark.vllm), ("sglang", pytest.mark.sglang))
    for tp, pp in TOPOLOGIES
    for prefix in (True, False)
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    case: Case = request.param
    expected = stock_answers(case.engine, case.tp, case.pp, case.prefix_caching)
    with launch(*overrides_of(case.engine, case.tp, case.pp, case.prefix_caching), "kv=elastic") as elastic:
        yield Pair(case, elastic, expected)


def test_nothing_is_committed_before_the_first_request(pair: Pair) -> None:
    wait_until(pair.elastic.at_baseline, 30, f"resident {pair.elastic.resident_bytes()}")


@pytest.mark.supports("tokens of the stock engine at 1x1, 2x1, 1x2 and 2x2, prefix cache on and off")
def test_tokens_are_those_of_the_stock_engine(pair: Pair) -> None:
    assert pair.elastic.plan.kv.guard
    distinct = {tuple(tokens) for tokens in pair.expected[0]}
    assert len(distinct) > len(PROMPTS) // 2, "the model answers everything alike: this test would prove nothing"
    for expected in pair.expected:
        assert pair.elastic.complete_all(PROMPTS) == expected


@pytest.mark.supports("memory follows the load on every rank")
def test_memory_follows_the_load_on_every_rank(pair: Pair) -> None:
    engine = pair.elastic
    wait_until(engine.at_baseline, 30, f"idle: resident {engine.resident_bytes()}")
    # Halfway through a round every request has 80 tokens that it shares with none.
    needed = [0.8 * len(PROMPTS) * 80 * rank.kv_bytes_per_token for rank in engine.plan.ranks]
    with Load(engine, PROMPTS, max_tokens=160) as load:
        load.until_resident(needed)
    wait_until(engine.at_baseline, 30, f"after the load: resident {engine.resident_bytes()}, peak {load.peak}")


def test_the_kernel_and_the_ranks_agree_on_what_is_mapped(pair: Pair) -> None:
    engine = pair.elastic
    engine.complete_all(PROMPTS[:4])
    wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
    wait_until(lambda: engine.mapped_bytes() == engine.resident_bytes(), 10, "ps and smaps differ")


def test_every_rank_knows_its_place(pair: Pair) -> None:
    case, engine = pair.case, pair.elastic
    world_size = case.tp * case.pp
    about = engine.kv_events()
    assert sorted(about) == list(range(world_size))
    for rank, told in about.items():
        pp_rank, tp_rank = divmod(rank, case.tp)
        assert told["exported"] == {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "KVLAUNCH_GLOBAL_RANK": str(rank),
            "KVLAUNCH_WORLD_SIZE": str(world_size),
            "KVLAUNCH_TP_RANK": str(tp_rank),
            "KVLAUNCH_PP_RANK": str(pp_rank),
        }
        assert told["listener"] == f"ipc://{engine.paths.listener_socket(pp_rank)}"
        assert told["listens"] == (tp_rank == 0)
    assert len(list(engine.paths.root.glob("kv-s*"))) == case.pp
    assert len({told["pid"] for told in about.values()}) == world_size


@pytest.mark.supports("an idle engine stays idle")
def test_it_stays_quiet_when_idle(pair: Pair) -> None:
    """At baseline nothing wakes the scheduler: it uses no processor time to speak of."""
    import psutil

    engine = pair.elastic
    wait_until(engine.at_baseline, 30, f"resident {engine.resident_bytes()}")
    family = psutil.Process(engine.process.pid).children(recursive=True)
    title = "EngineCore" if pair.case.engine == "vllm" else "sglang::scheduler"
    scheduler = next(process for process in family if title in " ".join(process.cmdline()))
    before = scheduler.cpu_times()
    time.sleep(2)
    after = scheduler.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
