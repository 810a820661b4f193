"""Two hosts, one real engine: the tokens of kv=static, memory that falls on the remote stage, and ends in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import load_agent
from kvlaunch.secret import new_secret
from tests.engines.harness import (
    ALIKE,
    PROMPTS,
    READY_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Engine,
    Load,
    kvlaunch,
    overrides_of,
    stock_answers,
    wait_until,
)
from tests.hosts import Host, hosts

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Node(Engine):
    """The launcher on one host."""

    runtime: Path = field(default_factory=Path)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.runtime / "kvlaunch" / self.run)


@contextlib.contextmanager
def cluster(pair: list[Host], *overrides: str, secret: bool = True) -> Iterator[list[Node]]:
    """The same command on every host, until it is ready on all of them. By node rank."""
    command = [
        *(sys.executable, "-m", "kvlaunch.cli.main", "up", "model=tiny-qwen3", "--json", f"nnodes={len(pair)}"),
        *("server.host=0.0.0.0", f"rdzv.endpoint={pair[0].addr}:29400", "rdzv.id=job7", *overrides),
    ]
    shared = {"KVLAUNCH_SECRET": new_secret().text} if secret else {}
    processes, watchdogs = [], []
    with contextlib.ExitStack() as stack:
        for host in pair:
            log = stack.enter_context((host.runtime / "err").open("w+"))
            process = subprocess.Popen(
                host.command(*command),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=host.environ(**shared),
            )
            stack.callback(end, process)
            watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
            watchdog.start()
            watchdogs.append(watchdog)
            stack.callback(watchdog.cancel)
            processes.append(process)
        nodes = []
        for host, process, watchdog in zip(pair, processes, watchdogs, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            watchdog.cancel()
            if not line:
                raise AssertionError(f"{host.name} ended before it was ready:\n" + "\n".join(map(story, pair)))
            ready = json.loads(line)
            nodes.append(Node(process, ready["run"], ready["url"], runtime=host.runtime))
        for node in nodes:
            node.url = f"http://{pair[0].addr}:8000"
        yield sorted(nodes, key=node_rank)


def limits(node: Node, size: str) -> list[int | None]:
    """`kvlaunch limit SIZE` on a node; what each rank keeps then, in bytes."""
    done = kvlaunch("limit", size, node.run, "--json", XDG_RUNTIME_DIR=str(node.runtime))
    assert done.returncode == 0, done.stderr
    return [rank["limit_bytes"] for rank in json.loads(done.stdout)["ranks"]]


def story(host: Host) -> str:
    """What the launcher on a host said, and the end of its engine's log."""
    logs = [host.runtime / "err", *host.runtime.glob("kvlaunch/*/logs/engine.log")]
    return "\n".join(f"== {host.name}, {log.name}\n{log.read_text()[-6000:]}" for log in logs if log.exists())


def node_rank(node: Node) -> int:
    agent = load_agent(node.paths)
    assert agent is not None
    assert agent.node_rank is not None
    return agent.node_rank


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize(
    ("engine", "tp", "pp"),
    [
        pytest.param("vllm", 1, 2, marks=pytest.mark.vllm),
        pytest.param("vllm", 2, 2, marks=pytest.mark.vllm),
        pytest.param("vllm", 2, 1, marks=[pytest.mark.vllm, ALIKE]),
        pytest.param("sglang", 1, 2, marks=pytest.mark.sglang),
        pytest.param("sglang", 2, 1, marks=pytest.mark.sglang),
    ],
)
def test_tokens_and_memory(engine: str, tp: int, pp: int) -> None:
    """A stage on each host; with pp=1, the one stage on both of them."""
    expected = stock_answers(engine, tp, pp, True)
    with hosts(2) as pair, cluster(pair, *overrides_of(engine, tp, pp, True)) as nodes:
        head, other = nodes
        assert [head.complete_all(PROMPTS) for _ in range(2)] == expected
        remote = [rank.global_rank for rank in other.plan.ranks if rank.node_rank == 1]
        assert sorted(other.kv_events()) == remote
        page = max(other.page_bytes())
        with Load(head, PROMPTS, 64):
            wait_until(lambda: min(other.resident_bytes()) > 2 * page, 120, "memory on the remote ranks")
        wait_until(lambda: max(other.resident_bytes()) <= 2 * page, 60, "memory given back on the remote ranks")
        for node in nodes:
            entry = node.ps()
            assert [rank["global_rank"] for rank in entry["ranks"]] == list(range(tp * pp))
            assert all(rank["kv"]["mapped_bytes"] <= 2 * page for rank in entry["ranks"])
        if engine == "sglang":
            for size, limited in ((str(64 * page), True), ("none", False)):
                assert [rank is not None for rank in limits(other, size)] == [limited] * tp * pp
        other.process.send_signal(signal.SIGINT)
        assert [node.process.wait(STOP_TIMEOUT_S) for node in nodes] == [0, 0]


@pytest.mark.parametrize(
    "engine", [pytest.param("vllm", marks=[pytest.mark.vllm, ALIKE]), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_the_stock_engine_needs_no_secret_and_gives_the_tokens_of_one_host(engine: str) -> None:
    with hosts(2) as pair, cluster(pair, *overrides_of(engine, 1, 2, True), "kv=static", secret=False) as nodes:
        assert [nodes[0].complete_all(PROMPTS) for _ in range(2)] == stock_answers(engine, 1, 2, True)
        done = kvlaunch("stop", nodes[1].run, XDG_RUNTIME_DIR=str(nodes[1].runtime))
        assert done.returncode == 0, done.stderr
        assert [node.process.wait(STOP_TIMEOUT_S) for node in nodes] == [0, 0]


@ALIKE
@pytest.mark.chaos
@pytest.mark.vllm
def test_a_rank_that_is_killed_on_the_other_host_is_reported_on_both() -> None:
    with hosts(2) as pair, cluster(pair, *overrides_of("vllm", 1, 2, True)) as nodes:
        os.kill(nodes[1].kv_events()[1]["pid"], signal.SIGKILL)
        assert [node.process.wait(30) for node in nodes] == [5, 5]
        for host in pair:
            assert "rank 1" in (host.runtime / "err").read_text()
