"""What holds for the recipe of every engine: what is refused and why, and that a plan is complete and pure."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvlaunch.config.schema import EngineName
from kvlaunch.engines.options import OptionRules
from kvlaunch.engines.registry import recipe_for
from kvlaunch.engines.sglang.options import RULES as SGLANG
from kvlaunch.engines.vllm.options import RULES as VLLM
from kvlaunch.errors import PlanError
from kvlaunch.plan.types import LaunchPlan
from tests.unit.test_plan import plan

RULES: dict[str, OptionRules] = {"vllm": VLLM, "sglang": SGLANG}
pytestmark = pytest.mark.contract


def made(engine: str, **changes: Any) -> LaunchPlan:
    return plan(engine=engine, **changes)


def given(name: str) -> Any:
    """A value that switches the option on, whatever its kind."""
    return 2 if name.endswith("size") or name == "dp" else "x"


def cases(kind: str) -> list[tuple[str, str]]:
    return [(engine, name) for engine, rules in RULES.items() for name in getattr(rules, kind)]


@pytest.mark.parametrize("engine", RULES)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_plan_names_every_rank_once_and_each_stage_has_a_leader(engine: str, tp: int, pp: int) -> None:
    planned = made(engine, tp=tp, pp=pp)
    assert planned.engine == recipe_for(EngineName(engine)).name == engine
    assert [rank.global_rank for rank in planned.ranks] == list(range(tp * pp)) == list(range(planned.world_size))
    assert [(stage.pp_rank, stage.leader) for stage in planned.stages] == [(s, s * tp) for s in range(pp)]
    assert sorted(rank for stage in planned.stages for rank in stage.ranks) == list(range(tp * pp))
    assert len({stage.endpoint for stage in planned.stages}) == pp
    layers = [planned.ranks[s * tp].layers for s in range(pp)]
    assert layers[0][0] == 0
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(layers))
    assert LaunchPlan.from_json(planned.to_json()) == planned


@pytest.mark.parametrize("engine", RULES)
def test_the_same_config_makes_the_same_plan(engine: str) -> None:
    assert made(engine, tp=2, pp=2) == made(engine, tp=2, pp=2)


@pytest.mark.parametrize("engine", RULES)
def test_static_reserves_nothing_beyond_the_engines_own_cache(engine: str) -> None:
    elastic, static = made(engine, tp=2, pp=2), made(engine, tp=2, pp=2, mode="static")
    assert (elastic.kv.mode, static.kv.mode) == ("elastic", "static")
    assert [rank.layers for rank in elastic.ranks] == [rank.layers for rank in static.ranks]


@pytest.mark.parametrize(("engine", "name"), cases("owned"))
def test_an_option_that_kvlaunch_sets_itself_is_refused_with_the_key_to_use(engine: str, name: str) -> None:
    with pytest.raises(PlanError) as caught:
        made(engine, args={name: given(name)})
    assert f"engine.args.{name}" in caught.value.message
    assert caught.value.hint is not None
    assert f"{RULES[engine].owned[name]}=" in caught.value.hint


@pytest.mark.parametrize("mode", ["elastic", "static"])
@pytest.mark.parametrize(("engine", "name"), cases("never"))
def test_an_option_that_no_run_can_take_is_refused_by_name(engine: str, name: str, mode: str) -> None:
    with pytest.raises(PlanError, match=rf"engine\.args\.{name}="):
        made(engine, args={name: given(name)}, mode=mode)


@pytest.mark.parametrize(("engine", "name"), cases("not_elastic"))
def test_an_option_that_elastic_cannot_do_is_refused_by_name_and_static_takes_it(engine: str, name: str) -> None:
    with pytest.raises(PlanError, match=rf"engine\.args\.{name} does not work with kv=elastic"):
        made(engine, args={name: given(name)})
    made(engine, args={name: given(name)}, mode="static")


@pytest.mark.parametrize("engine", RULES)
def test_an_option_that_is_off_is_no_option(engine: str) -> None:
    for name in RULES[engine].not_elastic:
        assert made(engine, args={name: None}) == made(engine)
