"""What elasticity costs while serving: throughput and time to first token, elastic against static.

Both engines run side by side and take turns, so that a machine that gets slower or faster does so for both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import serve, stats

KV = "kv.reserve=512MiB"
AT_ONCE = 16
"""Requests in work at the same time; the others of a round wait in the engine's queue."""
MAX_TOKENS = 64
"""Of a request, on average."""
DISTURBED = 0.08
"""A pair counts as disturbed where other processes used more than this share of the processors in a round of it."""
QUIET = 0.15
"""A round begins when the machine is idle but for this share: an engine's processes spin for seconds after their last
step, and would take a processor from the other engine's round."""
COUNTED = ("steps", "stalled_steps", "stalls", "stall_seconds", "maps", "unmaps")


@dataclass(frozen=True)
class Pair:
    """A round of each engine with the same prompts, and what the elastic one's KVStats counted meanwhile."""

    rounds: dict[str, serve.Round]
    first_token_s: dict[str, float]
    counts: dict[str, float]

    @property
    def others_cpu(self) -> float:
        return max(one.others_cpu for one in self.rounds.values())


def measure(engine: str, tp: int, pp: int, *, engines: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Pairs of rounds of about `seconds` on one topology, `pairs` of them on each of so many pairs of engines.

    Two engines of the same settings differ for as long as they live, so they are started anew, and each goes first by
    turns. On a pair of engines rounds are made until `pairs` of them were not disturbed, or three times as many are
    over: then the least disturbed ones count.
    """
    shape = [f"engine={engine}", f"tp={tp}", f"pp={pp}", KV, serve.at_once(engine, AT_ONCE + 1)]
    kept: list[list[Pair]] = []
    pairs_made = requests = 0
    for i, started in enumerate(stats.abba(engines, "static", "elastic")):
        with ExitStack() as stack:
            both = {kv: stack.enter_context(serve.engine(*shape, f"kv={kv}")) for kv in started}
            requests = _warm_up(both, seconds, requests)
            made: list[Pair] = []
            for j, order in enumerate(stats.abba(3 * pairs, "elastic", "static")):
                made.append(_pair(both, order, requests, seed=1000 * i + 100 + j))
                speeds = " ".join(f"{kv} {one.tokens_per_s:.1f}" for kv, one in sorted(made[-1].rounds.items()))
                others = f"others {made[-1].others_cpu:.2f}"
                print(f"   {tp}x{pp} engines {i + 1} pair {j + 1}: tokens/s {speeds}, {others}", flush=True)
                if sum(pair.others_cpu <= DISTURBED for pair in made) == pairs:
                    break
        pairs_made += len(made)
        kept.append(sorted(made, key=lambda pair: pair.others_cpu)[:pairs])
    about = {"topology": f"{tp}x{pp}", "requests_a_round": requests, "at_once": AT_ONCE, "mean_tokens": MAX_TOKENS}
    return {**about, "engines": engines, "pairs_made": pairs_made, **_summary(kept)}


def _pair(engines: dict[str, serve.Engine], order: Sequence[str], requests: int, seed: int) -> Pair:
    texts, limits = serve.prompts(requests, seed), serve.lengths(requests, seed, MAX_TOKENS)
    rounds: dict[str, serve.Round] = {}
    first: dict[str, float] = {}
    before = serve.settled_stats(engines["elastic"])
    for kv in order:
        serve.quiet(QUIET, timeout_s=30)
        rounds[kv] = serve.load_round(engines[kv], texts, limits)
    after = serve.settled_stats(engines["elastic"])
    for kv in order:
        serve.quiet(QUIET, timeout_s=30)
        few = texts[: AT_ONCE // 2]  # fewer than may run at once: the probe never queues
        first[kv] = statistics.median(serve.first_token_latencies(engines[kv], few, max_tokens=3 * MAX_TOKENS))
    return Pair(rounds, first, {name: after[name] - before[name] for name in COUNTED})


def _summary(engines: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """Of the pairs of rounds of each pair of engines."""
    pairs = [pair for group in engines for pair in group]
    rounds = [one for pair in pairs for one in pair.rounds.values()]
    counts = {name: sum(pair.counts[name] for pair in pairs) for name in COUNTED}

    def ratio(of: Callable[[Pair, str], float]) -> dict[str, Any]:
        return stats.grouped_summary([[of(pair, "elastic") / of(pair, "static") for pair in one] for one in engines])

    def speed(kv: str) -> dict[str, Any]:
        return stats.summary([pair.rounds[kv].tokens_per_s for pair in pairs], 1)

    return {
        "seconds_a_round": round(statistics.median(one.seconds for one in rounds), 2),
        "throughput_ratio": ratio(lambda pair, kv: pair.rounds[kv].tokens_per_s),
        "first_token_ratio": ratio(lambda pair, kv: pair.first_token_s[kv]),
        "cpu_per_token_ratio": ratio(lambda pair, kv: pair.rounds[kv].cpu_s / pair.rounds[kv].tokens),
        "tokens_per_s": {kv: speed(kv) for kv in ("elastic", "static")},
        **counts,
        "stalled_share": round(counts["stalled_steps"] / counts["steps"], 5),
        "others_cpu": stats.summary([pair.others_cpu for pair in pairs]),
    }


def _warm_up(engines: dict[str, serve.Engine], seconds: float, requests: int) -> int:
    """Warm both engines up, and find how many requests make a round of about `seconds` where that is not known (0)."""
    last: serve.Round | None = None
    for seed in range(2):
        for engine in engines.values():
            serve.quiet(QUIET, timeout_s=30)
            count = AT_ONCE * 2
            last = serve.load_round(engine, serve.prompts(count, seed), serve.lengths(count, seed, MAX_TOKENS))
    assert last is not None
    return requests or max(2, round(2 * seconds / last.seconds)) * AT_ONCE


def run(options: argparse.Namespace) -> dict[str, Any]:
    found = []
    for topology in options.topologies.split(","):
        tp, pp = (int(part) for part in topology.split("x"))
        found.append(
            measure(options.engine, tp, pp, engines=options.engines, pairs=options.pairs, seconds=options.seconds)
        )
    about = {"benchmark": "overhead", "engine": options.engine, "a": "kv=elastic", "b": "kv=static"}
    return {**about, "host": stats.host(), "results": found}


def table(result: dict[str, Any]) -> str:
    rows = []
    for one in result["results"]:
        speed, first = one["throughput_ratio"], one["first_token_ratio"]
        rows.append(
            [
                one["topology"],
                one["engines"],
                speed["rounds"],
                speed["median"],
                f"{speed['median_95'][0]}..{speed['median_95'][1]}",
                first["median"],
                f"{first['median_95'][0]}..{first['median_95'][1]}",
                one["cpu_per_token_ratio"]["median"],
                f"{100 * one['stalled_share']:.2f} %",
            ]
        )
    header = [
        "tp x pp",
        "engines",
        "pairs",
        "throughput",
        "95 %",
        "first token",
        "95 %",
        "cpu/token",
        "steps that waited",
    ]
    return "elastic / static\n" + stats.table(header, rows)
