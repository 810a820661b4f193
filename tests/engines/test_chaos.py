"""Who dies, hangs or is cut off under a real vLLM on two hosts, with requests in work: the rows of docs/hosts.md."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest

from kvlaunch.launch.state import AgentRecord, RunState, load_agent, load_state
from tests.engines.harness import ALIKE, Engine, overrides_of, prompts, wait_until
from tests.engines.test_hosts import Node, cluster
from tests.hosts import Host, hosts

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.vllm,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

HUNG_S = 5.0
NODE_S = 6.0
SOON_S = 15.0
"""Within which a death is noticed and told, and the requests in work have their error; these machines are slow."""
SERVES_AGAIN_S = 180.0
TIMEOUTS = (f"timeouts.hung_s={HUNG_S}", f"timeouts.node_s={NODE_S}")
TEXTS = prompts(6)


class InWork:
    """Requests that take longer than the test would wait, each in a thread of its own."""

    def __init__(self, engine: Engine, count: int = 3) -> None:
        self.outcomes: list[str] = []
        self._engine = engine
        self._streams = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._streams.acquire(timeout=60), "no first token"

    def _ask(self, index: int) -> None:
        at = urllib.parse.urlsplit(self._engine.url)
        body = {
            "model": self._engine.plan.model.name,
            "prompt": TEXTS[index],
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection(str(at.hostname), at.port)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            said = [reply.readline()]
            self._streams.release()
            said += reply
            failed = any(b'"error"' in line for line in said)  # vLLM ends the stream after it as it ends any other
            done = any(b"[DONE]" in line for line in said)
            self.outcomes.append("error" if failed else "finished" if done else "cut short")
        except (OSError, http.client.HTTPException) as error:
            self.outcomes.append(f"error: {type(error).__name__}")
        finally:
            connection.close()

    def end_within(self, seconds: float) -> None:
        """Every one has ended, and none as if it had been finished."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        silent = sum(thread.is_alive() for thread in self._threads)
        assert not silent, f"{silent} requests are silent after {seconds} s; the others: {self.outcomes}"
        assert "finished" not in self.outcomes


@dataclass
class Cluster:
    hosts: list[Host]
    nodes: list[Node]
    before: list[list[int]]
    """What it answered at first."""

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def agent(self, node: int) -> AgentRecord:
        found = load_agent(self.nodes[node].paths)
        assert found is not None
        return found

    def api(self) -> int:
        engine = self.agent(0).engine
        assert engine is not None
        return engine[0]

    def scheduler(self) -> int:
        family = psutil.Process(self.api()).children(recursive=True)
        (found,) = [process.pid for process in family if "EngineCore" in " ".join([process.name(), *process.cmdline()])]
        return found

    def rank(self, rank: int) -> int:
        return int(self.nodes[rank].kv_events()[rank]["pid"])  # a rank a node

    def generations(self) -> set[int]:
        return {self.agent(i).epoch for i in range(len(self.nodes))}


@contextlib.contextmanager
def serving(tp: int, pp: int, *overrides: str) -> Iterator[Cluster]:
    with hosts(2) as pair, cluster(pair, *overrides_of("vllm", tp, pp, True), *TIMEOUTS, *overrides) as nodes:
        order = sorted(pair, key=lambda host: next(i for i, node in enumerate(nodes) if node.runtime == host.runtime))
        yield Cluster(order, nodes, nodes[0].complete_all(TEXTS))


@pytest.fixture(scope="module")
def lasting() -> Iterator[Cluster]:
    """One that comes back from each of the deaths below; a stage a host."""
    with serving(1, 2, "max_restarts=10") as found:
        yield found


@pytest.fixture(scope="module")
def lasting_stage() -> Iterator[Cluster]:
    """The same with one stage, which lies on both hosts."""
    with serving(2, 1, "max_restarts=10") as found:
        yield found


Death = tuple[Callable[[Cluster], int], signal.Signals]


DEATHS: dict[str, Death] = {
    "the API process is killed": (Cluster.api, signal.SIGKILL),
    "the scheduler is killed": (Cluster.scheduler, signal.SIGKILL),
    "the leader of stage 0 is killed": (lambda it: it.rank(0), signal.SIGKILL),
    "the leader of stage 1 is killed": (lambda it: it.rank(1), signal.SIGKILL),
    "the leader of stage 0 hangs": (lambda it: it.rank(0), signal.SIGSTOP),
    "the leader of stage 1 hangs": (lambda it: it.rank(1), signal.SIGSTOP),
}
DEATHS_IN_A_STAGE: dict[str, Death] = {
    "the rank without a listener is killed": (lambda it: it.rank(1), signal.SIGKILL),
    "the rank without a listener hangs": (lambda it: it.rank(1), signal.SIGSTOP),
}
"""Where both ranks are of one stage."""
ALWAYS = "the scheduler is killed"


@pytest.mark.parametrize("death", [pytest.param(one, marks=() if one == ALWAYS else ALIKE) for one in DEATHS])
def test_requests_get_an_error_and_a_new_generation_serves(lasting: Cluster, death: str) -> None:
    _dies_and_serves_again(lasting, DEATHS[death])


@ALIKE
@pytest.mark.parametrize("death", DEATHS_IN_A_STAGE)
def test_a_stage_on_two_hosts_serves_again(lasting_stage: Cluster, death: str) -> None:
    _dies_and_serves_again(lasting_stage, DEATHS_IN_A_STAGE[death])


def _dies_and_serves_again(lasting: Cluster, death: Death) -> None:
    find, signum = death
    (epoch,) = lasting.generations()
    in_work = InWork(lasting.head)
    killed_at = time.time()
    os.kill(find(lasting), signum)
    in_work.end_within(SOON_S + (HUNG_S if signum == signal.SIGSTOP else 0))

    def serves() -> bool:
        states = [load_state(node.paths) for node in lasting.nodes]
        return min(lasting.generations()) > epoch and all(
            state is not None and state.state is RunState.READY and state.ready_at and state.ready_at > killed_at
            for state in states
        )

    wait_until(serves, SERVES_AGAIN_S, "a new generation that serves")
    assert len(lasting.generations()) == 1
    assert lasting.head.complete_all(TEXTS) == lasting.before
    page = max(lasting.nodes[1].page_bytes())
    for node in lasting.nodes:
        wait_until(lambda node=node: max(node.resident_bytes()) <= 2 * page, 60, "the memory of a new map, at idle")


@pytest.mark.parametrize(
    "what",
    [
        "the network is cut",
        pytest.param("the launcher of node 0 is killed", marks=ALIKE),
        pytest.param("node 1 is gone", marks=ALIKE),
    ],
)
def test_requests_get_an_error_and_everything_ends(what: str) -> None:
    with serving(1, 2) as it:
        in_work = InWork(it.head)
        everything = [p for node in it.nodes for p in psutil.Process(node.process.pid).children(recursive=True)]
        began = time.monotonic()
        if what == "the network is cut":
            it.hosts[1].cut()
        elif what == "the launcher of node 0 is killed":
            it.nodes[0].process.kill()
        else:  # all of it in one moment, as when its power fails
            it.hosts[1].cut()
            for process in [*psutil.Process(it.nodes[1].process.pid).children(recursive=True), it.nodes[1].process]:
                process.kill()
        in_work.end_within(NODE_S + SOON_S)
        codes = [node.process.wait(NODE_S + SOON_S) for node in it.nodes]
        assert time.monotonic() - began < NODE_S + SOON_S
        said = [(host.runtime / "err").read_text() for host in it.hosts]
        _, alive = psutil.wait_procs(everything, timeout=5)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        if what == "node 1 is gone":  # its host is there again: the next command removes what nobody could
            assert it.hosts[1].run(sys.executable, "-m", "kvlaunch.cli.main", "ps", "--json").stdout == "[]\n"
    if what == "the network is cut":
        assert codes == [4, 4], said
        assert all("silent" in one or "has not answered" in one for one in said)
    elif what == "the launcher of node 0 is killed":
        assert codes == [-signal.SIGKILL, 5], said
        assert "The launcher was killed" in said[1]
        assert it.hosts[0].name in said[1]
    else:
        assert codes == [4, -signal.SIGKILL], said
        assert it.hosts[1].name in said[0]
