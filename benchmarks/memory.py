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


def largest_mapping(pid: int, least: int) -> tuple[int, int]:
    """(address, bytes) of the smallest mapping that holds `least` bytes: the stock engine's KV buffer.

    The kernel joins neighbours, so the mapping may be a little larger than the buffer.
    """
    sizes = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if end - start >= least:
            sizes.append((end - start, start))
    if not sizes:
        raise SystemExit(f"process {pid} has no mapping of {least} bytes: where is its KV cache?")
    size, address = min(sizes)
    return address, size


def regions(engine: serve.Engine) -> list[tuple[int, int, int]]:
    """(pid, address, bytes) of each rank's KV cache."""
    if engine.plan.kv.mode == "elastic":
        about = engine.kv_events()
        return [(about[r]["pid"], about[r]["address"], about[r]["nbytes"]) for r in sorted(about)]
    return [(pid, *largest_mapping(pid, engine.plan.kv.reserve_bytes)) for pid in engine.rank_pids()]


def committed(where: list[tuple[int, int, int]]) -> list[int]:
    return [resident_bytes(*region) for region in where]


def under_load(engine: serve.Engine, where: list[tuple[int, int, int]]) -> list[int]:
    """The highest that was seen on each rank during a load."""
    peak = committed(where)
    texts = serve.prompts(96, seed=7)
    load = threading.Thread(target=lambda: serve.load_round(engine, texts, clients=32, max_tokens=160))
    load.start()
    while load.is_alive():
        peak = [max(pair) for pair in zip(peak, committed(where), strict=True)]
        time.sleep(0.1)
    return peak


def measure(tp: int, pp: int, reserve: str) -> dict[str, Any]:
    shape = [f"tp={tp}", f"pp={pp}", f"kv.reserve={reserve}", "kv.cache.idle_s=2"]
    result: dict[str, Any] = {"topology": f"{tp}x{pp}"}
    with ExitStack() as stack:
        engines = {kv: stack.enter_context(serve.engine(*shape, f"kv={kv}")) for kv in ("static", "elastic")}
        for kv, engine in engines.items():
            where = regions(engine)
            page = [engine.plan.kv.blocks_per_page * rank.kv_bytes_per_block for rank in engine.plan.ranks]
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
    found = [measure(2, 2, options.reserve)]
    return {"benchmark": "memory", "unit": "bytes a rank", "host": stats.host(), "results": found}


def table(result: dict[str, Any]) -> str:
    def kib(values: list[int]) -> str:
        return " ".join(f"{value // 1024:,}" for value in values)

    rows = [
        [one["topology"], kv, kib(one[kv]["idle"]), kib(one[kv]["under_load"]), kib(one[kv]["after"])]
        for one in result["results"]
        for kv in ("elastic", "static")
    ]
    return "KiB of the KV cache, rank by rank\n" + stats.table(["tp x pp", "kv", "idle", "under load", "after"], rows)
