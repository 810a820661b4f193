"""What elasticity costs while serving: throughput and time to first token, elastic against static.

Both engines run side by side and take turns, so that a machine that gets slower or faster does so for both.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from typing import Any

from benchmarks import serve, stats

KV = "kv.reserve=512MiB"


def measure(tp: int, pp: int, *, pairs: int, seconds: float, clients: int, max_tokens: int) -> dict[str, Any]:
    """Pairs of rounds of about `seconds` on one topology. A is elastic, B static."""
    shape = [f"tp={tp}", f"pp={pp}", KV]
    with ExitStack() as stack:
        engines = {kv: stack.enter_context(serve.engine(*shape, f"kv={kv}")) for kv in ("static", "elastic")}
        requests = _calibrate(engines, seconds, clients, max_tokens)
        before = serve.settled_stats(engines["elastic"])
        rounds: dict[str, list[serve.Round]] = {"elastic": [], "static": []}
        noise = []
        for i, order in enumerate(stats.abba(pairs, "elastic", "static")):
            noise.append(serve.quiet())
            texts = serve.prompts(requests, seed=100 + i)
            for kv in order:
                rounds[kv].append(serve.load_round(engines[kv], texts, clients=clients, max_tokens=max_tokens))
        after = serve.settled_stats(engines["elastic"])
    steps = after["steps"] - before["steps"]
    stalled = after["stalled_steps"] - before["stalled_steps"]
    speed = {kv: [r.tokens_per_s for r in done] for kv, done in rounds.items()}
    first = {kv: [statistics.median(r.first_token_s) for r in done] for kv, done in rounds.items()}
    return {
        "topology": f"{tp}x{pp}",
        "requests_a_round": requests,
        "clients": clients,
        "max_tokens": max_tokens,
        "seconds_a_round": round(statistics.median(r.seconds for done in rounds.values() for r in done), 2),
        "throughput_ratio": stats.summary(stats.ratios(speed["elastic"], speed["static"])),
        "first_token_ratio": stats.summary(stats.ratios(first["elastic"], first["static"])),
        "tokens_per_s": {kv: stats.summary(values, 1) for kv, values in speed.items()},
        "steps": steps,
        "stalled_steps": stalled,
        "stalled_share": round(stalled / steps, 5),
        "maps": after["maps"] - before["maps"],
        "unmaps": after["unmaps"] - before["unmaps"],
        "others_used_cpu": stats.summary(noise, 2),
    }


def _calibrate(engines: dict[str, serve.Engine], seconds: float, clients: int, max_tokens: int) -> int:
    """Warm both engines up, and find how many requests make a round of about `seconds`."""
    last: serve.Round | None = None
    for seed in range(2):
        for engine in engines.values():
            last = serve.load_round(engine, serve.prompts(clients * 2, seed), clients=clients, max_tokens=max_tokens)
    assert last is not None
    wanted = round(clients * 2 * seconds / last.seconds / clients)
    return max(1, wanted) * clients  # a whole number for each client: no round ends with idle ones


def run(options: argparse.Namespace) -> dict[str, Any]:
    found = []
    for topology in options.topologies.split(","):
        tp, pp = (int(part) for part in topology.split("x"))
        found.append(measure(tp, pp, pairs=options.pairs, seconds=options.seconds, clients=16, max_tokens=64))
    return {"benchmark": "overhead", "a": "kv=elastic", "b": "kv=static", "host": stats.host(), "results": found}


def table(result: dict[str, Any]) -> str:
    rows = []
    for one in result["results"]:
        speed, first = one["throughput_ratio"], one["first_token_ratio"]
        rows.append(
            [
                one["topology"],
                speed["rounds"],
                speed["median"],
                f"{speed['median_95'][0]}..{speed['median_95'][1]}",
                first["median"],
                f"{first['median_95'][0]}..{first['median_95'][1]}",
                f"{100 * one['stalled_share']:.2f} %",
            ]
        )
    header = ["tp x pp", "pairs", "throughput", "95 %", "first token", "95 %", "steps that waited"]
    return "elastic / static\n" + stats.table(header, rows)
