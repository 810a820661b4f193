"""Time until ready: `kvlaunch up` against the bare engine command with the same settings, by turns."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import time
from typing import Any

from benchmarks import serve, stats
from kvlaunch.launch.ports import hold_port, port_of
from kvlaunch.launch.probe import NotAnswering, complete_one_token
from kvlaunch.launch.shm import segments_of, unlink_segments
from kvlaunch.plan.types import LaunchPlan

POLL_S = 0.05
BARE_MODULE = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}


def plan_of(*overrides: str) -> LaunchPlan:
    command = [*serve.KVLAUNCH, "plan", "model=tiny-qwen3", "--json", *overrides]
    return LaunchPlan.from_json(subprocess.run(command, capture_output=True, check=True).stdout)


def bare_command(plan: LaunchPlan) -> tuple[list[str], dict[str, str]]:
    """The plan's own argv and environment without kvlaunch: the engine's module, no plugin, a stock KV cache of that
    size."""
    node = plan.nodes[0]
    argv = list(node.argv)
    argv[argv.index("-m") + 1] = BARE_MODULE[plan.engine]
    if plan.engine == "vllm":
        argv[argv.index("--kv-cache-memory-bytes") + 1] = str(plan.kv.reserve_bytes)
    environ = {name: value for name, value in os.environ.items() if name not in node.unset} | node.env
    environ = {name: value for name, value in environ.items() if not name.startswith("KVLAUNCH_")}
    return argv, {**environ, "VLLM_PLUGINS": "", "SGLANG_PLUGINS": "none"}


def start_bare(shape: list[str]) -> float:
    """Seconds until the bare command has completed one token."""
    with hold_port("127.0.0.1") as held:
        return start_bare_on(port_of(held), shape)


def start_bare_on(port: int, shape: list[str]) -> float:
    plan = plan_of(*shape, f"server.port={port}")
    argv, environ = bare_command(plan)
    started = time.perf_counter()
    process = subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                complete_one_token("127.0.0.1", port, plan.model.name, timeout_s=60)
                return time.perf_counter() - started
            except NotAnswering:
                if process.poll() is not None or time.perf_counter() - started > serve.READY_TIMEOUT_S:
                    raise SystemExit(f"the bare engine did not come up: {' '.join(argv)}") from None
                time.sleep(POLL_S)
    finally:
        end_bare(process)


def end_bare(process: subprocess.Popen[Any]) -> None:
    """End the engine and all that it started, and remove the shared memory that it leaves behind."""
    import psutil

    if process.poll() is not None:
        return
    bare = psutil.Process(process.pid)
    family = [bare, *bare.children(recursive=True)]
    segments = segments_of(one.pid for one in family)
    serve.end(process)
    for one in family[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family[1:], timeout=serve.STOP_TIMEOUT_S)
    unlink_segments(segments)


def start_kvlaunch(shape: list[str]) -> float:
    """Seconds until `kvlaunch up` says that it is ready: it has completed one token and asked every rank."""
    started = time.perf_counter()
    with serve.engine(*shape):
        return time.perf_counter() - started


def measure(engine: str, tp: int, pp: int, pairs: int) -> dict[str, Any]:
    shape = [f"engine={engine}", f"tp={tp}", f"pp={pp}"]
    seconds: dict[str, list[float]] = {"kvlaunch": [], "bare": []}
    noise = []
    start_kvlaunch(shape)  # makes the tiny model, and fills the page cache for both
    for order in stats.abba(pairs, "kvlaunch", "bare"):
        for which in order:
            noise.append(serve.quiet(timeout_s=120))
            seconds[which].append((start_kvlaunch if which == "kvlaunch" else start_bare)(shape))
            print(f"   {tp}x{pp} {which} {seconds[which][-1]:.1f} s", flush=True)
    return {
        "topology": f"{tp}x{pp}",
        "ratio": stats.summary(stats.ratios(seconds["kvlaunch"], seconds["bare"])),
        "seconds": {which: stats.summary(values, 1) for which, values in seconds.items()},
        "others_used_cpu": stats.summary(noise, 2),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    found = []
    for topology in options.start_topologies.split(","):
        tp, pp = (int(part) for part in topology.split("x"))
        found.append(measure(options.engine, tp, pp, options.starts))
    return {
        "benchmark": "start",
        "engine": options.engine,
        "a": "kvlaunch up (kv=elastic, its defaults)",
        "b": "the plan's engine command without kvlaunch, stock KV cache of the same size",
        "host": stats.host(),
        "results": found,
    }


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            one["topology"],
            one["ratio"]["rounds"],
            one["seconds"]["kvlaunch"]["median"],
            one["seconds"]["bare"]["median"],
            one["ratio"]["median"],
            f"{one['ratio']['min']}..{one['ratio']['max']}",
        ]
        for one in result["results"]
    ]
    return "seconds until ready\n" + stats.table(["tp x pp", "pairs", "kvlaunch", "bare", "ratio", "spread"], rows)
