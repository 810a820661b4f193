"""What a commit costs over many stages, on one machine: real requester, simulated stages.

A stage of 16 real ranks is measured first. Then a process plays up to 64 stages of that many ranks: each answers a
request after the time that the real stage took, over CurveZMQ on TCP, as a stage on another host does. What a commit
takes beyond that time is its own cost: to seal, send, receive and judge as many messages as there are stages.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from benchmarks import stats
from benchmarks.plot import line_plot
from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.ipc.curve import server_keys
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.messages import Done
from kvlaunch.kv.ipc.peer import StagePeer
from kvlaunch.kv.ipc.roles import stage_role
from kvlaunch.kv.memory.noop import NoopBackend
from kvlaunch.kv.rank import RankMemory
from kvlaunch.secret import Secret, new_secret

RANKS = 16
STAGES = (1, 2, 4, 8, 16, 32, 64)
PAGES = 1024
WARM_UP = 20
RUN = "scale"


def _rank(global_rank: int) -> RankMemory:
    geometry = BlockGeometry.from_strips([(0, 4096)], num_blocks=PAGES, blocks_per_page=1, granularity=4096)
    region = NoopBackend().reserve(geometry.region_bytes)
    return RankMemory(region, geometry, global_rank=global_rank, pp_rank=0, tp_rank=global_rank, run=RUN, epoch=0)


def stage_seconds(operations: int) -> float:
    """Median time of a commit in one stage of RANKS ranks, threads of this process, without memory."""
    with tempfile.TemporaryDirectory(prefix="kvl-scale-", dir="/tmp") as folder, ExitStack() as stack:
        peer_path, endpoint = Path(folder) / "p0", f"ipc://{folder}/s0"
        listener = StageListener(_rank(0), endpoint=endpoint, peer_path=peer_path, peers=range(1, RANKS))
        stack.callback(listener.close)
        listener.start()
        for rank in range(1, RANKS):
            peer = StagePeer(_rank(rank), peer_path=peer_path)
            stack.callback(peer.close)
            peer.start()
        listener.wait_ready(30)
        channel = ZmqChannel(
            {0: endpoint}, leaders={0: 0}, run=RUN, epoch=0, sender="m", timeout_s=5, sockets={0: peer_path}
        )
        stack.callback(channel.close)
        return statistics.median(_commits(channel, operations))


def _commits(channel: ZmqChannel, operations: int) -> list[float]:
    """Seconds of each map and unmap, by turns."""
    found = []
    for i in range(WARM_UP + operations):
        started = time.perf_counter()
        (channel.unmap if i % 2 else channel.map)([(1, 4)])
        if i >= WARM_UP:
            found.append(time.perf_counter() - started)
    return found


def play_stages(count: int, secret: Secret, delay_s: float, control: Connection) -> None:
    """Answer for so many stages until the other end of `control` closes. In a process of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller, endpoints = zmq.Poller(), []
    for pp_rank in range(count):
        keys, router = server_keys(secret, RUN, stage_role(pp_rank)), context.socket(zmq.ROUTER)
        router.linger = 0
        router.curve_publickey, router.curve_secretkey, router.curve_server = keys.public, keys.private, True
        router.bind("tcp://127.0.0.1:*")
        endpoints.append(router.get_string(zmq.LAST_ENDPOINT))
        poller.register(router, zmq.POLLIN)
    poller.register(control.fileno(), zmq.POLLIN)
    control.send(endpoints)
    due: list[tuple[float, int, zmq.Socket[bytes], bytes, bytes]] = []
    number, asked = 0, True
    while asked:
        wait_ms = max(0.0, (due[0][0] - time.perf_counter()) * 1000) if due else 1000
        for sock, _ in poller.poll(0 if wait_ms < 1 else int(wait_ms)):
            if not isinstance(sock, zmq.Socket):
                asked = False
                continue
            identity, raw = sock.recv_multipart()
            reply = wire.encode(Done(seq=wire.decode_request(raw).seq))
            number += 1
            heapq.heappush(due, (time.perf_counter() + delay_s, number, sock, identity, reply))
        while due and due[0][0] <= time.perf_counter():
            _, _, sock, identity, reply = heapq.heappop(due)
            sock.send_multipart([identity, reply])
    context.destroy(linger=0)


def own_cost(stages: int, delay_s: float, operations: int) -> dict[str, Any]:
    """Milliseconds of a commit over so many stages beyond the time of one stage."""
    secret = new_secret()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=play_stages, args=(stages, secret, delay_s, theirs))
    process.start()
    theirs.close()
    endpoints = ours.recv()
    channel = ZmqChannel(
        dict(enumerate(endpoints)),
        leaders={pp: pp * RANKS for pp in range(stages)},
        run=RUN,
        epoch=0,
        sender="m",
        timeout_s=10,
        secret=secret,
    )
    try:
        own = [(seconds - delay_s) * 1e3 for seconds in _commits(channel, operations)]
    finally:
        channel.close()
        ours.close()
        process.join()
    return {"stages": stages, "ranks": stages * RANKS, "own_ms": stats.summary(own)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    delay_s = stage_seconds(options.operations)
    results = [own_cost(stages, delay_s, options.operations) for stages in STAGES]
    points = [(one["stages"], one["own_ms"]["median"]) for one in results]
    options.results.mkdir(parents=True, exist_ok=True)
    text = line_plot(points, x="stages of 16 ranks", y="own cost of a commit, ms (median)")
    (options.results / "scale.svg").write_text(text)
    about = {"benchmark": "scale", "ranks_a_stage": RANKS, "stage_ms": round(delay_s * 1e3, 3)}
    return {**about, "host": stats.host(), "results": results}


def table(result: dict[str, Any]) -> str:
    rows = [
        [one["stages"], one["ranks"], one["own_ms"]["median"], one["own_ms"]["q1"], one["own_ms"]["q3"]]
        for one in result["results"]
    ]
    head = f"a stage of {result['ranks_a_stage']} ranks takes {result['stage_ms']} ms; beyond that:"
    return f"{head}\n" + stats.table(["stages", "ranks", "own ms", "q1", "q3"], rows)
