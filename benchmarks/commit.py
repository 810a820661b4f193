"""What it costs to change the KV memory of all ranks: map and unmap over four rank processes, in microseconds.

    python -m benchmarks.commit [--json FILE] [--rounds N] [--operations N]

A is kvlaunch: two stages of two ranks on this host, a channel to the two listeners, memory that does nothing. B is the
least that can be had: one request of the same size to four processes over raw unix sockets, all sent, then all answers
read. The two take turns in rounds, so that both see the same machine. With --zmq, A takes the way between hosts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.peer import StagePeer
from kvlaunch.kv.memory.noop import NoopBackend
from kvlaunch.kv.rank import RankMemory

RANKS, TP_SIZE = 4, 2
LAYERS, PAGES, PAGE_BYTES = 1, 1024, 64 * 1024
WARM_UP = 200
RAW_BYTES = 64


def rank_process(folder: str, global_rank: int, control: Connection) -> None:
    """One rank without memory, until the other end of `control` closes."""
    pp_rank, tp_rank = divmod(global_rank, TP_SIZE)
    strips = [(layer * PAGES * PAGE_BYTES, PAGE_BYTES) for layer in range(LAYERS)]
    geometry = BlockGeometry.from_strips(strips, num_blocks=PAGES, blocks_per_page=1, granularity=4096)
    region = NoopBackend().reserve(geometry.region_bytes)
    rank = RankMemory(region, geometry, global_rank=global_rank, pp_rank=pp_rank, tp_rank=tp_rank, run="bench", epoch=0)
    peer_path = Path(folder) / f"p{pp_rank}"
    member: StageListener | StagePeer
    if tp_rank == 0:
        peers = range(global_rank + 1, global_rank + TP_SIZE)
        member = StageListener(rank, endpoint=f"ipc://{folder}/s{pp_rank}", peer_path=peer_path, peers=peers)
        member.start()
        member.wait_ready(60)
    else:
        member = StagePeer(rank, peer_path=peer_path)
        member.start()
    control.send("ready")
    _wait_for_end(control)
    member.close()


def echo_process(path: str, control: Connection) -> None:
    """Answers each request with as many bytes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen(1)
        control.send("ready")
        sock, _ = server.accept()
    with sock:
        while data := sock.recv(4096):
            sock.send(data)
    _wait_for_end(control)


def _wait_for_end(control: Connection) -> None:
    with suppress(EOFError):
        control.recv()


class Processes:
    """Processes that end when their pipe closes."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[tuple[Any, Connection]] = []

    def start(self, target: Callable[..., None], *args: Any) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        theirs.close()
        self._started.append((process, ours))

    def wait_ready(self) -> None:
        for _, control in self._started:
            if not control.poll(60):
                raise SystemExit("a process did not come up within 60 s")
            control.recv()

    def end(self) -> None:
        for _, control in self._started:
            control.close()
        for process, _ in self._started:
            process.join(10)


def time_calls(call: Callable[[], object], n: int) -> list[float]:
    """Microseconds of each of n calls."""
    clock = time.perf_counter_ns
    out = []
    for _ in range(n):
        started = clock()
        call()
        out.append((clock() - started) / 1000)
    return out


def time_commits(channel: ZmqChannel, n: int) -> tuple[list[float], list[float]]:
    """Microseconds of n maps and of n unmaps of one page, by turns."""
    clock = time.perf_counter_ns
    maps, unmaps = [], []
    for i in range(n):
        pages = [(1 + i % (PAGES - 1), 1)]
        started = clock()
        channel.map(pages)
        between = clock()
        channel.unmap(pages)
        maps.append((between - started) / 1000)
        unmaps.append((clock() - between) / 1000)
    return maps, unmaps


def raw_round_trip(sockets: Sequence[socket.socket]) -> Callable[[], None]:
    payload = bytes(RAW_BYTES)

    def call() -> None:
        for sock in sockets:
            sock.send(payload)
        for sock in sockets:
            sock.recv(4096)

    return call


def percentiles(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50": round(statistics.median(ordered), 1), "p99": round(ordered[int(len(ordered) * 0.99)], 1)}


def summary(name: str, ours: Sequence[Sequence[float]], raw: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A and B over all rounds; the ratio of their medians within a round, over the rounds."""
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, raw, strict=True)]
    return {
        "name": name,
        "unit": "us",
        "rounds": len(ours),
        "a": percentiles([t for times in ours for t in times]),
        "b": percentiles([t for times in raw for t in times]),
        "ratio": {
            "median": round(statistics.median(ratios), 2),
            "min": round(min(ratios), 2),
            "max": round(max(ratios), 2),
        },
        "host": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load": round(os.getloadavg()[0], 2),
        },
    }


def measure(folder: Path, rounds: int, operations: int, *, by_zmq: bool = False) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        processes = Processes()
        stack.callback(processes.end)
        for rank in range(RANKS):
            processes.start(rank_process, str(folder), rank)
            processes.start(echo_process, str(folder / f"e{rank}"))
        processes.wait_ready()
        channel = ZmqChannel(
            {pp: f"ipc://{folder}/s{pp}" for pp in range(RANKS // TP_SIZE)},
            leaders={pp: pp * TP_SIZE for pp in range(RANKS // TP_SIZE)},
            run="bench",
            epoch=0,
            sender="bench",
            sockets=None if by_zmq else {pp: folder / f"p{pp}" for pp in range(RANKS // TP_SIZE)},
        )
        stack.callback(channel.close)
        sockets = []
        for rank in range(RANKS):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.connect(os.fspath(folder / f"e{rank}"))
            sockets.append(sock)
        raw_call = raw_round_trip(sockets)
        time_commits(channel, WARM_UP)
        time_calls(raw_call, WARM_UP)
        maps, unmaps, raws = [], [], []
        for _ in range(rounds):
            a_map, a_unmap = time_commits(channel, operations)
            maps.append(a_map)
            unmaps.append(a_unmap)
            raws.append(time_calls(raw_call, operations))
    return [summary("commit.map", maps, raws), summary("commit.unmap", unmaps, raws)]


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':14}{'kvlaunch p50':>14}{'p99':>8}{'raw p50':>10}{'p99':>8}{'ratio':>8}  (spread)   microseconds"]
    for r in results:
        ratio = r["ratio"]
        lines.append(
            f"{r['name']:14}{r['a']['p50']:14}{r['a']['p99']:8}{r['b']['p50']:10}{r['b']['p99']:8}"
            f"{ratio['median']:8}  ({ratio['min']}..{ratio['max']})"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commit", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of A and B by turns")
    parser.add_argument("--operations", type=int, default=500, help="maps, unmaps and raw round trips a round")
    parser.add_argument("--zmq", action="store_true", help="reach the listeners by ZeroMQ")
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="kvl-bench-", dir="/tmp"))  # short: a socket's path may have 107 bytes
    try:
        results = measure(folder, options.rounds, options.operations, by_zmq=options.zmq)
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
