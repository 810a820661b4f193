"""Committed bytes of the KV cache on every rank: idle, under load, after the load; elastic and static."""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import serve, stats
from kvlaunch.kv.memory.smaps import resident_bytes

AFTER_S = 30.0
"""Deadline for the memory to be back after a load: kv.cache.idle_s is 2 s here."""


def large_mappings(pid: int, least: int) -> list[tuple[int, int, int]]:
    """(pid, address, bytes) of the private anonymous mappings that hold `least` bytes or more.

    The kernel joins neighbours, so a mapping may be larger than the buffers that it holds.
    """
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split()
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if end - start >= least and len(fields) == 5 and fields[1] == "rw-p":
            found.append((pid, start, end - start))
    if not found:
        raise SystemExit(f"process {pid} has no mapping of {least} bytes: where is its KV cache?")
    return found


def smallest_mapping(pid: int, least: int) -> tuple[int, int]:
    """(address, bytes) of the smallest of them: the stock engine's KV buffer, where that is one piece."""
    _, address, size = min(large_mappings(pid, least), key=lambda mapping: mapping[2])
    return address, size


Regions = list[list[tuple[int, int, int]]]
"""By global rank: (pid, address, bytes) of what makes up its KV cache."""


def regions(engine: serve.Engine) -> Regions:
    plan = engine.plan
    if plan.kv.mode == "elastic":
        about = engine.kv_events()
        return [[(about[r]["pid"], about[r]["address"], about[r]["nbytes"])] for r in sorted(about)]
    if plan.engine == "sglang":  # keys and values of each layer in buffers of their own
        parts = [2 * (rank.layers[1] - rank.layers[0] + 1) for rank in plan.ranks]
        least = [plan.kv.reserve_bytes // count for count in parts]
        return [large_mappings(pid, size) for pid, size in zip(engine.rank_pids(), least, strict=True)]
    return [[(pid, *smallest_mapping(pid, plan.kv.reserve_bytes))] for pid in engine.rank_pids()]


def committed(where: Regions) -> list[int]:
    return [sum(resident_bytes(*region) for region in rank) for rank in where]


def under_load(engine: serve.Engine, where: Regions) -> list[int]:
    """The highest that was seen on each rank during a load."""
    peak = committed(where)
    texts = serve.prompts(96, seed=7)
    load = threading.Thread(target=lambda: serve.load_round(engine, texts, [160] * len(texts)))
    load.start()
    while load.is_alive():
        peak = [max(pair) for pair in zip(peak, committed(where), strict=True)]
        time.sleep(0.1)
    return peak


def measure(name: str, tp: int, pp: int, reserve: str) -> dict[str, Any]:
    shape = [f"engine={name}", f"tp={tp}", f"pp={pp}", f"kv.reserve={reserve}", "kv.cache.idle_s=2"]
    shape.append(serve.at_once(name, 32))
    result: dict[str, Any] = {"topology": f"{tp}x{pp}"}
    with ExitStack() as stack:
        engines = {kv: stack.enter_context(serve.engine(*shape, f"kv={kv}")) for kv in ("static", "elastic")}
        for kv, engine in engines.items():
            where = regions(engine)
            page = engine.plan.page_bytes
            result["reserved"] = engine.plan.kv.reserve_bytes
            idle = committed(where)
            peak = under_load(engine, where)
            deadline = time.monotonic() + AFTER_S
            after, finished = committed(where), time.monotonic()
            while kv == "elastic" and time.monotonic() < deadline:
                after = committed(where)
                if all(got <= 2 * one for got, one in zip(after, page, strict=True)):
                    break
                time.sleep(0.1)
            result[kv] = {
                "idle": idle,
                "under_load": peak,
                "after": after,
                "after_s": round(time.monotonic() - finished, 1),
            }
    return result


def run(options: argparse.Namespace) -> dict[str, Any]:
    found = [measure(options.engine, 2, 2, options.reserve)]
    return {
        "benchmark": "memory",
        "engine": options.engine,
        "unit": "bytes a rank",
        "host": stats.host(),
        "results": found,
    }


def table(result: dict[str, Any]) -> str:
    def kib(values: list[int]) -> str:
        return " ".join(f"{value // 1024:,}" for value in values)

    rows = [
        [one["topology"], kv, kib(one[kv]["idle"]), kib(one[kv]["under_load"]), kib(one[kv]["after"])]
        for one in result["results"]
        for kv in ("elastic", "static")
    ]
    return "KiB of the KV cache, rank by rank\n" + stats.table(["tp x pp", "kv", "idle", "under load", "after"], rows)
