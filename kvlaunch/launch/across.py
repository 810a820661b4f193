"""An agent's part in a run on several nodes: it meets the others, stays in touch with them, and ends as they do."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvlaunch.errors import EngineError, KVLaunchError, RendezvousError
from kvlaunch.launch import listeners
from kvlaunch.launch.deaths import load_death
from kvlaunch.launch.diagnose import ended_as, engine_failed, report_of
from kvlaunch.launch.failure import first_failure
from kvlaunch.launch.nodes import (
    Meeting,
    NodeEnd,
    NodeFacts,
    NodeLink,
    free_port,
    meet,
    node_lost,
    of_node,
    settings_of,
    store_lost,
)
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.ports import listening_pid
from kvlaunch.launch.procfs import send
from kvlaunch.launch.state import AgentExit, AgentRecord, FailureReport, RunState, load_state, save_agent
from kvlaunch.plan.address import address_towards, endpoint_here, is_local, joined_endpoint, split_endpoint
from kvlaunch.plan.types import LaunchPlan
from kvlaunch.secret import load_secret

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("kvlaunch.across")

FOLLOW_S = 1.0
"""After another node has failed, this one's engine may take so long to notice by itself: its story may be earlier."""
FORCE_S = 5.0
"""Beyond the grace period: a main thread that hangs in a cut network ends no engine."""
CONNECT_S = 10.0
ASK_AGAIN_S = 0.5


class NodeAgent(Protocol):
    """What is used of the agent (agent.py)."""

    plan: LaunchPlan
    paths: RunPaths
    record: AgentRecord

    def end_now(self, ended: AgentExit) -> None:
        """End everything, from whichever thread."""


class AcrossNodes:
    """Belongs to one agent. Called from its main thread, but for what the NodeLink calls."""

    def __init__(self, agent: NodeAgent) -> None:
        plan = agent.plan
        self.addr = plan.rdzv.local_addr or _address_towards(plan.rdzv.endpoint, plan.rdzv.timeout_s)
        self.endpoint = endpoint_here(plan.rdzv.endpoint)
        self.meeting: Meeting | None = None
        self._agent = agent
        self._plan = plan
        self._paths = agent.paths
        self._secret = load_secret(agent.paths.secret, {}) if agent.paths.secret.exists() else None
        self._attempt = 0
        self._met_at = 0.0
        self._port: socket.socket | None = None
        self._link: NodeLink | None = None
        self._heard: NodeEnd | None = None
        self._lost: FailureReport | None = None
        self._stop: NodeEnd | None = None
        """What this node has announced."""

    def rendezvous_options(self) -> dict[str, Any]:
        """For torch's handler, beside what one node needs too."""
        host, port = split_endpoint(self.endpoint)
        beat_s = max(1, round(self._plan.timeouts.node_s / 3))
        return {
            # torch would compare host names, which need not be what the endpoint is called.
            "is_host": is_local(host) and listening_pid(port) is None,
            "keep_alive_interval": beat_s,
            "keep_alive_max_attempt": 3,
        }

    def connect(self) -> Store:
        """A connection of one's own to the store of the run.

        Raises:
            RuntimeError: torch's, where there is none.
        """
        from torch.distributed import PrefixStore, TCPStore

        host, port = split_endpoint(self.endpoint)
        timeout = timedelta(seconds=min(CONNECT_S, self._plan.rdzv.timeout_s))
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"kvlaunch/{self._plan.run}", store)

    def arrived(self) -> None:
        """Be counted among those who have reached the store."""
        self.connect().add("arrived", 1)

    def not_met(self, *, reached: bool) -> AgentExit:
        """What to say of a rendezvous that failed.

        Args:
            reached: whether the store was there, and can be asked who came.
        """
        if self._lost is not None:
            waited = f" It did not come back within {self._plan.rdzv.timeout_s:g} s."
            report = msgspec.structs.replace(self._lost, message=self._lost.message + waited)
            return AgentExit(kind="node", report=report)
        if self.meeting is not None:
            return AgentExit(kind="node", report=store_lost(self._plan.rdzv.endpoint, "does not answer any more"))
        there = 0
        if reached:
            with contextlib.suppress(RuntimeError):  # it is there no more
                there = int(self.connect().add("arrived", 0))
        # Who came and went again was counted too.
        there = min(max(there, 1), self._plan.nnodes - 1)
        return AgentExit(kind="rendezvous", message=f"{there} of {self._plan.nnodes} nodes came")

    def meet(self, handout: Store, group_rank: int) -> Meeting:
        """Agree on the next generation, and stay in touch with its nodes.

        Raises:
            RendezvousError: they do not come, or do not agree.
        """
        if self._link is not None:
            self._link.close()
        if self._port is None:
            self._port, port = free_port(self.addr)
            self._me = NodeFacts(
                host=socket.gethostname(),
                addr=self.addr,
                port=port,
                wish=self._plan.rdzv.node_rank,
                settings=settings_of(self._plan, self._secret),
            )
        static = self._plan.rdzv.backend == "static"
        meeting = meet(
            self.connect(),
            handout,
            attempt=self._attempt if static else 0,
            group_rank=group_rank,
            me=self._me,
            nnodes=self._plan.nnodes,
            timeout_s=self._plan.rdzv.timeout_s,
        )
        self._attempt += 1
        self.meeting, self._lost, self._met_at = meeting, None, time.time()
        self._link = NodeLink(
            self.connect,
            meeting,
            silence_s=self._plan.timeouts.node_s,
            url=self._url,
            on_end=self._follow,
            on_silent=self._lose,
            on_unreachable=self._give_up,
            on_served=self._served,
        )
        self._link.start()
        if self._plan.kv.mode == "elastic":
            threading.Thread(
                target=self._make_listeners_known, args=(meeting,), name="kvlaunch-discovery", daemon=True
            ).start()
        return meeting

    def announce_stop(self) -> None:
        """This node was told to end: say so before its engine ends, which the others' engines take for a failure."""
        if self._link is None or self._stop is not None or self._heard is not None:
            return
        self._stop = NodeEnd(t=time.time(), host=self._me.host, kind="stopped")
        self._link.settle(self._stop, wait=False)

    def settle(self, ended: AgentExit) -> AgentExit:
        """Exchange with the others how it ended. What came first counts for all."""
        if self.meeting is None or self._link is None:
            return ended
        mine = self._my_end(ended)
        # The store may be in this process: the others need a moment to read it.
        heard = self._link.settle(mine, wait=True)
        if self._heard is not None and self._heard not in heard:  # the store has gone meanwhile
            heard.append(self._heard)
        if mine is self._stop:
            return ended
        failed = [end for end in heard if end.kind == "failed" and end.report is not None]
        if self._heard is not None and self._heard.kind == "stopped":
            return AgentExit(kind="stopped", message=self._heard.host)
        if not failed:
            return ended
        first = min(failed, key=lambda end: end.t)
        if first is mine and ended.kind == "engine" and self._lost is None:
            return ended
        assert first.report is not None  # those without are left out above
        return AgentExit(kind="node", report=of_node(first.report, self.meeting, first.host))

    def report_failure(self, message: str) -> None:
        """Tell the others of a failure that this agent does not survive."""
        if self.meeting is not None and self._link is not None:
            report = FailureReport(error=EngineError.__name__, message=message)
            self._link.settle(NodeEnd(t=time.time(), host=self._me.host, kind="failed", report=report), wait=True)

    def _my_end(self, ended: AgentExit) -> NodeEnd:
        host, report = self._me.host, self._lost
        if self._stop is not None:
            return self._stop
        if self._heard is not None and ended.kind == "stopped":
            return NodeEnd(t=time.time(), host=host, kind="followed")
        if report is not None:
            return NodeEnd(t=time.time(), host=host, kind="failed", report=report)
        if ended.kind != "engine":
            report = ended.report or FailureReport(error=RendezvousError.__name__, message=ended.message)
            return NodeEnd(t=time.time(), host=host, kind="failed", report=report)
        first, death = first_failure(self._paths.root), load_death(self._paths)
        times = [known.t for known in (first, death) if known is not None]
        error = engine_failed(self._paths, ended_as(ended.status), death)
        return NodeEnd(t=min(times, default=time.time()), host=host, kind="failed", report=report_of(error))

    def _url(self) -> str | None:
        """Where this node serves, as the other nodes reach it; None while it does not."""
        state, server = load_state(self._paths), self._plan.server
        if state is None or state.state is not RunState.READY or state.ready_at is None:
            return None
        if state.ready_at < self._met_at:  # the launcher has not seen yet that a new generation begins
            return None
        anywhere = server.host in ("", "0.0.0.0", "::")
        return f"http://{joined_endpoint(self.addr, server.port)}" if anywhere else state.url

    def _served(self, url: str) -> None:
        self._agent.record.served = url
        save_agent(self._paths, self._agent.record)

    def _follow(self, end: NodeEnd) -> None:
        """Another node has ended: so does this one."""
        self._heard = end
        if end.kind == "failed":
            time.sleep(FOLLOW_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._plan.timeouts.term_s + FORCE_S)
        assert self.meeting is not None  # the link is made in a meeting
        report = of_node(end.report, self.meeting, end.host) if end.report else None
        kind: Any = "node" if report else "stopped"
        self._agent.end_now(AgentExit(kind=kind, message=end.host, report=report))

    def _lose(self, rank: int) -> None:
        """A node is gone: the engine cannot go on without it. torch's agent starts it again, or ends."""
        assert self.meeting is not None  # the link is made in a meeting
        self._lost = node_lost(self.meeting, rank, self._plan.timeouts.node_s)
        log.warning("%s", self._lost.message)
        if self._agent.record.engine is not None:
            send(self._agent.record.engine, signal.SIGKILL)

    def _give_up(self, what: str) -> None:
        self._agent.end_now(AgentExit(kind="node", report=store_lost(self._plan.rdzv.endpoint, what)))

    def _make_listeners_known(self, meeting: Meeting) -> None:
        from kvlaunch.kv.ipc import discovery

        plan, epoch = self._plan, meeting.epoch
        try:
            store = self.connect()
            roles = listeners.roles(plan)
            for role, node_rank in roles.items():
                if node_rank != meeting.node_rank:
                    continue
                path = self._paths.served_at(role)
                while not (found := listeners.load(path, epoch)):
                    if self.meeting is not meeting:
                        return
                    time.sleep(0.1)
                discovery.publish(store, run=plan.run, epoch=epoch, role=role, endpoint=found[role])
            everyone = discovery.look_up(store, run=plan.run, epoch=epoch, roles=roles, timeout_s=plan.timeouts.ready_s)
        except (RuntimeError, KVLaunchError) as error:
            log.warning("where KV requests are served is not known on all nodes: %s", error)
            return
        if self.meeting is meeting:
            listeners.save(self._paths.listeners, listeners.Listeners(epoch=epoch, endpoints=everyone))


def _address_towards(endpoint: str, timeout_s: float) -> str:
    """This host's address on the way to the endpoint. A name may be known only some seconds after its host has started.

    Raises:
        RendezvousError: it is not known after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while (addr := address_towards(endpoint)) is None:
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"{endpoint} was not known on this host within {timeout_s:g} s, or no route leads there.",
                hint="Check rdzv.endpoint, or give this host's own address as local_addr.",
            )
        time.sleep(ASK_AGAIN_S)
    return addr
