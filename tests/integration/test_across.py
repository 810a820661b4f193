"""Two hosts, one engine (a small one): they meet, they end together, and whatever dies is noticed in time."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvlaunch.events import Event, read_events
from kvlaunch.launch import listeners
from kvlaunch.launch.kvstate import rank_states
from kvlaunch.launch.state import load_agent
from kvlaunch.plan.types import LaunchPlan
from kvlaunch.secret import new_secret
from tests.hosts import Host, hosts
from tests.integration.launchkit import Kit, Launched, alive, wait_until

pytestmark = pytest.mark.multihost

NODE_S = 3.0
"""timeouts.node_s of these runs."""
PORT = 29400


@dataclass
class Pair:
    """Two hosts, and a launcher on each once they are launched."""

    hosts: list[Host]
    kits: list[Kit]
    launched: list[Launched]

    def plan(self, *flags: str, **changes: Any) -> LaunchPlan:
        """pp=2, a stage on each host."""
        changes = {"timeout_s": 20.0, "endpoint": f"{self.hosts[0].addr}:{PORT}", "run": "pair", **changes}
        plan = self.kits[0].plan(*flags, tp=1, pp=2, port=8000, **changes)
        node_of = {rank.global_rank: rank.pp_rank for rank in plan.ranks}
        (only,) = plan.nodes
        argv = list(only.argv)
        argv[argv.index("--world") + 1] = "1"
        timeouts = msgspec.structs.replace(plan.timeouts, node_s=NODE_S)
        return msgspec.structs.replace(
            plan,
            nnodes=2,
            timeouts=timeouts,
            ranks=tuple(msgspec.structs.replace(r, node_rank=node_of[r.global_rank]) for r in plan.ranks),
            stages=tuple(msgspec.structs.replace(s, node_rank=s.pp_rank, network=True) for s in plan.stages),
            nodes=tuple(
                msgspec.structs.replace(
                    only, node_rank=node, ranks=(node,), argv=(*argv, "--first-rank", str(node)), env={}
                )
                for node in range(2)
            ),
        )

    def one_stage(self, **changes: Any) -> LaunchPlan:
        """tp=2, a rank of the one stage on each host, with an elastic cache."""
        plan = self.plan("--kv", mode="elastic", **changes)
        return msgspec.structs.replace(
            plan,
            tp_size=2,
            pp_size=1,
            ranks=tuple(msgspec.structs.replace(r, pp_rank=0, tp_rank=r.global_rank) for r in plan.ranks),
            stages=(msgspec.structs.replace(plan.stages[0], ranks=(0, 1)),),
        )

    def launch(self, *plans: LaunchPlan) -> None:
        """One plan for both, or one for each. Stage sockets lie in each host's own run folder."""
        for kit, plan in zip(self.kits, plans if len(plans) == 2 else plans * 2, strict=True):
            self.launched.append(self.launch_on(kit, plan))

    @staticmethod
    def launch_on(kit: Kit, plan: LaunchPlan) -> Launched:
        stages = tuple(
            msgspec.structs.replace(s, endpoint=f"ipc://{kit.paths(plan.run).listener_socket(s.pp_rank)}")
            for s in plan.stages
        )
        return kit.launch(msgspec.structs.replace(plan, stages=stages))

    def ready(self) -> None:
        for launched in self.launched:
            launched.wait_for("ready")

    def node(self, rank: int) -> Launched:
        """The launcher of a node rank."""
        for launched in self.launched:
            agent = load_agent(launched.paths)
            if agent is not None and agent.node_rank == rank:
                return launched
        raise AssertionError(f"no node {rank}")

    def agent(self, rank: int) -> int:
        agent = load_agent(self.node(rank).paths)
        assert agent is not None
        return int(agent.agent[0])

    def engine(self, rank: int) -> int:
        agent = load_agent(self.node(rank).paths)
        assert agent is not None
        assert agent.engine is not None
        return int(agent.engine[0])

    def rank(self, rank: int) -> int:
        """The process of a global rank; here node and rank have one number."""
        launched = self.node(rank)
        return next(pid for pid in sorted(launched.pids(), reverse=True) if pid != self.engine(rank) and alive(pid))

    def gone(self, within_s: float) -> None:
        for launched in self.launched:
            launched.wait_gone(within_s)


@pytest.fixture
def pair() -> Iterator[Pair]:
    secret = new_secret().text
    with contextlib.ExitStack() as stack:
        both = stack.enter_context(hosts(2))
        kits = []
        for host in both:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlaunch-test-", dir="/tmp"))
            kit = Kit(host.runtime, Path(scratch))
            kit.command = host.command
            kit.environ |= {"KVLAUNCH_SECRET": secret}
            stack.callback(kit.close)
            kits.append(kit)
        yield Pair(both, kits, [])


@pytest.mark.parametrize("backend", ["c10d", "static"])
@pytest.mark.parametrize("mode", ["static", "elastic"])
def test_they_become_one_engine_and_end_together(pair: Pair, backend: str, mode: str) -> None:
    plan = pair.plan(*(["--kv"] if mode == "elastic" else []), mode=mode)
    plans = [
        msgspec.structs.replace(
            plan, rdzv=msgspec.structs.replace(plan.rdzv, backend=backend, node_rank=i if backend == "static" else None)
        )
        for i in range(2)
    ]
    pair.launch(*plans)
    pair.ready()
    assert {load.state.url for load in pair.launched if load.state} == {"http://127.0.0.1:8000"}
    pair.node(1).process.send_signal(signal.SIGINT)
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 0, err
    pair.gone(0.5)
    for launched in pair.launched:
        assert launched.state is not None
        assert launched.state.state.value == "stopped"
        assert not launched.paths.secret.exists()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


VICTIMS: dict[str, tuple[Callable[[Pair], int], int, int]] = {
    # who is killed; the node that survives it with a report of its own; its exit code
    "launcher 0": (lambda pair: pair.node(0).process.pid, 1, 5),
    "launcher 1": (lambda pair: pair.node(1).process.pid, 0, 5),
    "agent 0": (lambda pair: pair.agent(0), 1, 4),
    "agent 1": (lambda pair: pair.agent(1), 0, 4),
    "engine 0": (lambda pair: pair.engine(0), 1, 5),
    "engine 1": (lambda pair: pair.engine(1), 0, 5),
    "rank 0": (lambda pair: pair.rank(0), 1, 5),
    "rank 1": (lambda pair: pair.rank(1), 0, 5),
}
BOUND_S = NODE_S + 8.0
"""Silence, then the ends: a node follows within seconds, or its agent gives up."""


@pytest.mark.chaos
@pytest.mark.parametrize("victim", VICTIMS)
def test_who_is_killed_takes_all_along_in_time(pair: Pair, victim: str) -> None:
    find, survivor, status = VICTIMS[victim]
    pair.launch(pair.plan())
    pair.ready()
    left = pair.node(survivor)
    dead_host = pair.hosts[pair.launched.index(pair.node(1 - survivor))].name
    kill(find(pair))
    began = time.monotonic()
    code, _, err = left.end(BOUND_S)
    assert code == status, err
    assert dead_host in err or f"{pair.hosts[0].addr}:{PORT}" in err
    assert time.monotonic() - began < BOUND_S
    if victim.startswith("rank"):
        assert f"rank {victim[-1]}" in err
    pair.node(1 - survivor).process.wait(BOUND_S)
    pair.gone(5.0)


def test_an_engine_that_is_slow_to_end_does_not_hide_why_it_has_to(pair: Pair) -> None:
    """Longer than a node may be silent: the store is gone with the node that failed, and that is no second failure."""
    pair.launch(pair.plan("--ignore-term", term_s=NODE_S + 3.0))
    pair.ready()
    survivor = pair.launched[1]
    kill(pair.launched[0].process.pid)  # its agent holds the store
    code, _, err = survivor.end(BOUND_S + NODE_S + 3.0)
    assert code == 5, err
    assert "The launcher was killed" in err
    pair.launched[0].process.wait(BOUND_S)
    pair.gone(5.0)


@pytest.mark.chaos
@pytest.mark.parametrize("node", [0, 1])
def test_a_cable_that_is_pulled_ends_both_sides_in_time(pair: Pair, node: int) -> None:
    pair.launch(pair.plan())
    pair.ready()
    pair.hosts[pair.launched.index(pair.node(node))].cut()
    for launched in pair.launched:
        code, _, err = launched.end(BOUND_S)
        assert code == 4, err
        assert "silent" in err or "has not answered" in err
    pair.gone(1.0)


def events(launched: Launched) -> list[Event]:
    return read_events(launched.paths.events)[0]


def readies(pair: Pair, since: list[float]) -> list[list[float]]:
    """When each launcher said that it is ready, since its time."""
    return [
        [e.t for e in events(launched) if e.phase == "ready" and e.t > t]
        for launched, t in zip(pair.launched, since, strict=True)
    ]


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["engine 0", "engine 1", "rank 1"])
def test_a_new_generation_forms(pair: Pair, victim: str) -> None:
    find = VICTIMS[victim][0]
    pair.launch(pair.plan("--kv", mode="elastic", max_restarts=2))
    pair.ready()
    kill(find(pair))

    def next_generation() -> bool:
        agents = [load_agent(launched.paths) for launched in pair.launched]
        return all(agent is not None and agent.epoch >= 1 for agent in agents)

    wait_until(next_generation, 20, "a new generation")
    pair.ready()
    epochs = {agent.epoch for launched in pair.launched if (agent := load_agent(launched.paths))}
    assert len(epochs) == 1
    # What was ready before says nothing of the new one: node 0's ranks come first.
    begun = [max(e.t for e in events(launched) if e.phase == "engine") for launched in pair.launched]
    wait_until(lambda: all(readies(pair, begun)), 20, "ready again on both")
    kv = max(e.t for e in events(pair.node(0)) if e.phase == "kv")
    assert all(min(ready) > kv > max(begun) for ready in readies(pair, begun))
    pair.node(0).process.send_signal(signal.SIGINT)
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 0, err
    pair.gone(0.5)


def test_a_node_that_was_lost_comes_back_by_the_same_command(pair: Pair) -> None:
    """Case 8: one of two agents ends and is started again."""
    plan = pair.plan("--kv", mode="elastic", max_restarts=2)
    pair.launch(plan)
    pair.ready()
    lost = pair.launched.index(pair.node(1))
    kill(pair.agent(1))
    assert pair.launched[lost].end(BOUND_S)[0] == 5
    again = pair.launched[lost] = pair.launch_on(pair.kits[lost], plan)
    again.wait_for("ready")
    wait_until(lambda: all((a := load_agent(one.paths)) and a.epoch >= 1 for one in pair.launched), 20, "an epoch")
    pair.ready()
    again.process.send_signal(signal.SIGINT)
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 0, err


def test_nodes_that_were_not_started_alike(pair: Pair) -> None:
    one = pair.plan()
    other = msgspec.structs.replace(one, kv=msgspec.structs.replace(one.kv, block_size=32))
    pair.launch(one, other)
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 4
        assert "kv.block_size: 16 and 32" in err or "kv.block_size: 32 and 16" in err


def test_another_secret(pair: Pair) -> None:
    pair.kits[1].environ["KVLAUNCH_SECRET"] = new_secret().text
    pair.launch(pair.plan("--kv", mode="elastic"))
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 4
        assert "differ in the secret" in err


@pytest.mark.parametrize("present", [0, 1])
def test_one_that_stays_away(pair: Pair, present: int) -> None:
    plan = pair.plan(timeout_s=3.0)
    began = time.monotonic()
    launched = pair.kits[present].launch(plan)
    code, _, err = launched.end()
    assert code == 4
    assert f"{pair.hosts[0].addr}:{PORT}" in err
    assert "3 s" in err
    assert "1 of 2" in err
    assert time.monotonic() - began < 15


def test_a_secret_is_needed_for_an_elastic_cache(pair: Pair) -> None:
    del pair.kits[0].environ["KVLAUNCH_SECRET"]
    code, _, err = pair.kits[0].launch(pair.plan("--kv", mode="elastic")).end()
    assert code == 2
    assert "kvlaunch secret new" in err


def test_they_meet_by_ipv6_too(pair: Pair) -> None:
    pair.launch(pair.plan("--kv", mode="elastic", endpoint=f"[{pair.hosts[0].addr6}]:{PORT}"))
    pair.ready()
    known = listeners.load(pair.launched[0].paths.listeners, 0)
    assert sorted(known) == ["stage 0", "stage 1"]
    assert all(endpoint.startswith("tcp://[fd77:") for endpoint in known.values())
    pair.launched[1].process.send_signal(signal.SIGINT)
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 0, err


@pytest.mark.parametrize("itself", ["as a loopback address", "not at all"])
def test_names_that_resolve_one_way_only(pair: Pair, itself: str) -> None:
    """How a host knows its own name; the first one does not know the second one's."""
    first, second = pair.hosts
    own = itself == "as a loopback address"
    first.knows({first.name: "127.0.1.1"} if own else {})
    second.knows({first.name: first.addr} | ({second.name: "127.0.1.1"} if own else {}))
    pair.launch(pair.plan("--kv", mode="elastic", endpoint=f"{first.name}:{PORT}"))
    pair.ready()
    for launched in pair.launched:
        known = listeners.load(launched.paths.listeners, 0)
        assert {endpoint.rpartition(":")[0] for endpoint in known.values()} == {
            f"tcp://{host.addr}" for host in pair.hosts
        }
    pair.launched[1].process.send_signal(signal.SIGINT)
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 0, err


def test_wishes_for_node_ranks_are_kept(pair: Pair) -> None:
    plan = pair.plan()
    plans = [msgspec.structs.replace(plan, rdzv=msgspec.structs.replace(plan.rdzv, node_rank=1 - i)) for i in range(2)]
    pair.launch(*plans)
    pair.ready()
    assert [load_agent(launched.paths).node_rank for launched in pair.launched] == [1, 0]  # type: ignore[union-attr]
    pair.launched[0].process.send_signal(signal.SIGTERM)
    for launched in pair.launched:
        assert launched.end()[0] == 0


@pytest.mark.chaos
def test_a_hung_rank_is_noticed_on_its_node_and_told_to_the_other(pair: Pair) -> None:
    plan = pair.plan("--kv", mode="elastic")
    pair.launch(msgspec.structs.replace(plan, timeouts=msgspec.structs.replace(plan.timeouts, hung_s=3.0)))
    pair.ready()
    os.kill(pair.rank(1), signal.SIGSTOP)
    for launched in pair.launched:
        code, _, err = launched.end(20)
        assert code == 5
        assert "rank 1 failed first" in err
        assert "does not answer" in err
    pair.gone(1.0)


def test_a_stage_on_both_hosts(pair: Pair) -> None:
    plan = pair.one_stage()
    pair.launch(plan)
    pair.ready()
    paths = pair.node(0).paths
    states = rank_states(paths, LaunchPlan.load(paths.plan), timeout_s=5)
    assert [(state.global_rank, state.tp_rank, state.mapped_pages) for state in states] == [(0, 0, 1), (1, 1, 1)]
    for launched in pair.launched:
        assert sorted(listeners.load(launched.paths.listeners, 0)) == ["rank 1", "stage 0"]
    pair.launched[1].process.send_signal(signal.SIGINT)
    for launched in pair.launched:
        code, _, err = launched.end()
        assert code == 0, err
    pair.gone(1.0)


@pytest.mark.chaos
def test_a_hung_rank_is_noticed_by_its_leader_on_the_other_node(pair: Pair) -> None:
    plan = pair.one_stage()
    pair.launch(msgspec.structs.replace(plan, timeouts=msgspec.structs.replace(plan.timeouts, hung_s=3.0)))
    pair.ready()
    os.kill(pair.rank(1), signal.SIGSTOP)
    for launched in pair.launched:
        code, _, err = launched.end(20)
        assert code == 5
        assert "rank 1 failed first" in err
        assert "does not answer" in err
    pair.gone(1.0)
