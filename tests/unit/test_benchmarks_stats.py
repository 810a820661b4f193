"""Arithmetic of the benchmarks: pairs, ratios, quantiles. Nothing is timed."""

from __future__ import annotations

import random

import pytest

from benchmarks import serve, stats
from benchmarks.__main__ import NAMES, parse


def test_quantiles_lie_between_the_values() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [stats.quantile(values, q) for q in (0, 0.5, 1)] == [1.0, 2.5, 4.0]
    assert stats.quantile([7.0], 0.3) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        stats.quantile([], 0.5)


def test_a_ratio_is_taken_within_its_pair() -> None:
    assert stats.ratios([1.0, 30.0], [2.0, 10.0]) == [0.5, 3.0]


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_what_is_no_pair_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="no pairs"):
        stats.ratios(a, b)


def test_the_summary_names_spread_and_rounds() -> None:
    found = stats.summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found["median"], found["q1"], found["q3"]) == (3.0, 2.0, 4.0)
    assert (found["min"], found["max"], found["rounds"]) == (1.0, 100.0, 5)
    low, high = found["median_95"]
    assert 1.0 <= low <= 3.0 <= high <= 100.0


def test_the_bounds_of_the_median_narrow_with_more_rounds() -> None:
    draw = random.Random(1)
    values = [draw.gauss(1.0, 0.1) for _ in range(400)]

    def width(count: int) -> float:
        low, high = stats.median_interval(values[:count])
        return high - low

    assert width(400) < width(20) / 2
    assert stats.median_interval(values) == stats.median_interval(values)


def test_values_of_few_groups_leave_wide_bounds() -> None:
    draw = random.Random(1)
    groups = [[draw.gauss(mean, 0.01) for _ in range(50)] for mean in (0.9, 0.95, 1.0, 1.05, 1.1)]
    found = stats.grouped_summary(groups)
    low, high = found["median_95"]
    assert high - low > 0.1
    pooled = stats.median_interval([value for group in groups for value in group])
    assert pooled[1] - pooled[0] < 0.07
    assert (found["group_medians"], found["rounds"]) == (
        [pytest.approx(m, abs=0.01) for m in (0.9, 0.95, 1.0, 1.05, 1.1)],
        250,
    )
    assert stats.grouped_median_interval(groups[:1]) == stats.median_interval(groups[0])


def test_each_side_goes_first_equally_often() -> None:
    assert stats.abba(4, "a", "b") == [("a", "b"), ("b", "a")] * 2


def test_columns_line_up() -> None:
    lines = stats.table(["name", "x"], [["a", 1], ["longer", 100]]).splitlines()
    assert lines == ["name      x", "a         1", "longer  100"]


def test_prompts_share_no_prefix_and_repeat_exactly() -> None:
    texts = serve.prompts(40, seed=3)
    assert texts == serve.prompts(40, seed=3)
    assert len({text[:6] for text in texts + serve.prompts(40, seed=4)}) == 80


def test_all_benchmarks_run_where_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).names == list(NAMES)
    assert parse(["start", "--starts", "3"]).starts == 3
    with pytest.raises(SystemExit):
        parse(["speed"])
    assert "speed" in capsys.readouterr().err
