"""Paired measurements: ratios within a pair, their median and spread."""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Sequence
from typing import Any

RESAMPLES = 2000


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1) with linear interpolation."""
    if not values:
        raise ValueError("a quantile of nothing")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Bounds of the median at this level of confidence (percentile bootstrap, always with the same seed)."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return quantile(medians, (1 - level) / 2), quantile(medians, (1 + level) / 2)


def grouped_median_interval(groups: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float]:
    """The same for values of which those of a group have something in common, such as the processes measured.

    What is drawn is whole groups: more values of the same few groups do not narrow the bounds as more groups do.
    """
    if len(groups) == 1:
        return median_interval(groups[0], level)
    draw = random.Random(0)
    medians = [
        statistics.median(value for group in draw.choices(groups, k=len(groups)) for value in group)
        for _ in range(RESAMPLES)
    ]
    return quantile(medians, (1 - level) / 2), quantile(medians, (1 + level) / 2)


def grouped_summary(groups: Sequence[Sequence[float]], digits: int = 3) -> dict[str, Any]:
    """`summary` of all values, with the bounds of `grouped_median_interval`, and the median of each group."""
    low, high = grouped_median_interval(groups)
    found = summary([value for group in groups for value in group], digits)
    medians = [round(statistics.median(group), digits) for group in groups]
    return found | {"median_95": [round(low, digits), round(high, digits)], "group_medians": medians}


def summary(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median, quartiles, extremes, and the bounds of the median."""
    low, high = median_interval(values)
    numbers = {
        "median": statistics.median(values),
        "q1": quantile(values, 0.25),
        "q3": quantile(values, 0.75),
        "min": min(values),
        "max": max(values),
    }
    rounded = {name: round(value, digits) for name, value in numbers.items()}
    return rounded | {"median_95": [round(low, digits), round(high, digits)], "rounds": len(values)}


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a / b of each pair.

    Raises:
        ValueError: the two differ in length, or there is no pair.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} measurements are no pairs")
    return [x / y for x, y in zip(a, b, strict=True)]


def abba(rounds: int, first: str, second: str) -> list[tuple[str, str]]:
    """Who goes first in each pair, by turns: what the order does to a measurement cancels."""
    return [(first, second) if i % 2 == 0 else (second, first) for i in range(rounds)]


def host() -> dict[str, Any]:
    """What the machine is, as far as it matters to a ratio."""
    import psutil

    return {
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their contents; the first one to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
