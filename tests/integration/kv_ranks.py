"""Ranks for tests of the KV messages: each a real process with a RankMemory, driven through its standard input.

Run as a program it is such a process: one JSON object with its place as argument, then one command a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import zmq

from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.kv.ipc.client import ZmqChannel
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.messages import Map, Unmap
from kvlaunch.kv.ipc.peer import StagePeer
from kvlaunch.kv.memory.base import MemoryMapError
from kvlaunch.kv.memory.host import HostBackend
from kvlaunch.kv.rank import RankMemory

G = 4096
PAGES = 256
GEOMETRY = BlockGeometry.from_strips(
    [(layer * PAGES * 4 * G, G) for layer in range(4)], num_blocks=PAGES * 4, blocks_per_page=4, granularity=G
)
PAGE_BYTES = GEOMETRY.bytes_per_page
RUN, EPOCH = "testrun", 0
_RESETS = count(1)


class RankProcess:
    """One rank."""

    def __init__(self, folder: Path, global_rank: int, *, tp_size: int, peer_timeout_s: float, epoch: int) -> None:
        place = {
            "folder": str(folder),
            "global_rank": global_rank,
            "tp_size": tp_size,
            "peer_timeout_s": peer_timeout_s,
            "epoch": epoch,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.global_rank = global_rank
        self.pid = self._process.pid

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"rank {self.global_rank} ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.read()

    def pages(self) -> list[list[int]]:
        return self.ask("pages")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """End it the ordinary way, whatever state it is in; its exit status."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._process.stdout.close()


class Cluster:
    """All ranks of pp_size stages, and channels to them."""

    def __init__(
        self,
        folder: Path,
        *,
        tp_size: int = 2,
        pp_size: int = 2,
        peer_timeout_s: float = 1.0,
        epoch: int = EPOCH,
    ) -> None:
        self.folder = folder
        self.tp_size, self.pp_size = tp_size, pp_size
        self._stack = ExitStack()
        self._channels = 0
        self.ranks = [
            RankProcess(folder, r, tp_size=tp_size, peer_timeout_s=peer_timeout_s, epoch=epoch)
            for r in range(tp_size * pp_size)
        ]
        self.addresses = [rank.read()["address"] for rank in self.ranks]

    def channel(self, *, endpoints: dict[int, str] | None = None, by_zmq: bool = False, **kwargs: Any) -> ZmqChannel:
        """A channel by the stages' own sockets, or by ZeroMQ, or by other endpoints for some stages."""
        self._channels += 1
        sender = f"manager{self._channels}"
        options: dict[str, Any] = {"run": RUN, "epoch": EPOCH, "sender": sender, "timeout_s": 4.0, **kwargs}
        channel = ZmqChannel(
            {pp: self.endpoint(pp) for pp in range(self.pp_size)} | (endpoints or {}),
            sockets={
                pp: self.folder / f"p{pp}" for pp in range(self.pp_size) if not by_zmq and pp not in (endpoints or {})
            },
            leaders={pp: pp * self.tp_size for pp in range(self.pp_size)},
            **options,
        )
        self._stack.callback(channel.close)
        return channel

    def endpoint(self, pp_rank: int) -> str:
        return f"ipc://{self.folder}/s{pp_rank}"

    def pages(self) -> list[list[list[int]]]:
        return [rank.pages() for rank in self.ranks]

    def reset(self) -> None:
        """Close all channels, forget all faults, and unmap everything but the null block's page."""
        self._stack.close()
        for rank in self.ranks:
            rank.signal(signal.SIGCONT)
            rank.ask("reset")

    def close(self) -> list[int]:
        """Exit status of each rank: 0 where nothing was left in it."""
        self._stack.close()
        return [rank.end() for rank in self.ranks]


@contextmanager
def cluster(folder: Path, **kwargs: Any) -> Iterator[Cluster]:
    """Ranks that end well, or the test fails."""
    ranks = Cluster(folder, **kwargs)
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise
    assert ranks.close() == [0] * len(ranks.ranks)
    assert not [path for path in folder.iterdir() if path.is_socket()]


class Wire:
    """Stands between a channel and a listener, and can lose messages.

    Attributes:
        lose_requests, lose_replies: how many of the next ones are lost.
        requests: how many came.
    """

    def __init__(self, endpoint: str, to: str) -> None:
        self.lose_requests = self.lose_replies = self.requests = 0
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.bind(endpoint)
        self._back = self._context.socket(zmq.DEALER)
        self._back.linger = 0
        self._back.connect(to)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        identity = b""
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._front in ready:
                    identity, payload = self._front.recv_multipart()
                    self.requests += 1
                    if self.lose_requests:
                        self.lose_requests -= 1
                    else:
                        self._back.send(payload)
                if self._back in ready:
                    payload = self._back.recv()
                    if self.lose_replies:
                        self.lose_replies -= 1
                    else:
                        self._front.send_multipart((identity, payload))
        except zmq.ContextTerminated:
            self._front.close()
            self._back.close()

    def close(self) -> None:
        self._context.term()
        self._thread.join()
        self._path.unlink()


def main() -> None:
    place = json.loads(sys.argv[1])
    folder = Path(place["folder"])
    pp_rank, tp_rank = divmod(place["global_rank"], place["tp_size"])
    faults: list[str | None] = []
    operations: list[str] = []

    def fault(request: Map | Unmap) -> None:
        operations.append(type(request).__name__)
        reason = faults.pop(0) if faults else None
        if reason is not None:
            raise MemoryMapError(reason)

    region = HostBackend().reserve(GEOMETRY.region_bytes)
    rank = RankMemory(
        region,
        GEOMETRY,
        global_rank=place["global_rank"],
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        run=RUN,
        epoch=place["epoch"],
        fault=fault,
    )
    peers = [place["global_rank"] + i for i in range(1, place["tp_size"])]
    member: StageListener | StagePeer
    if tp_rank == 0:
        member = StageListener(
            rank,
            endpoint=f"ipc://{folder}/s{pp_rank}",
            peer_path=folder / f"p{pp_rank}",
            peers=peers,
            peer_timeout_s=place["peer_timeout_s"],
        )
        member.start()
        member.wait_ready(30)
    else:
        member = StagePeer(rank, peer_path=folder / f"p{pp_rank}", connect_timeout_s=30)
        member.start()
    print(json.dumps({"address": region.address}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_obey(json.loads(line), rank, faults, operations)), flush=True)
    member.close()
    rank.close()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if left:
        raise SystemExit(f"threads left: {left}")


def _obey(command: Sequence[Any], rank: RankMemory, faults: list[str | None], operations: list[str]) -> Any:
    match command:
        case ["pages"]:
            return rank.mapped_runs()
        case ["fail", *reasons]:
            faults.extend(reasons)
        case ["heal"]:
            faults.clear()
        case ["reset"]:
            faults.clear()
            _reset(rank)
            operations.clear()
        case ["operations"]:
            seen = list(operations)
            operations.clear()
            return seen
        case _:
            raise SystemExit(f"no such command: {command}")
    return None


def _reset(rank: RankMemory) -> None:
    pages = tuple((max(1, first), count - (first == 0)) for first, count in rank.mapped_runs())
    pages = tuple(run for run in pages if run[1])
    request = Unmap(run=rank.run, epoch=rank.epoch, sender="reset", seq=next(_RESETS), pages=pages)
    error = rank.apply(request).error
    if error is not None:
        raise SystemExit(error)


if __name__ == "__main__":
    main()
