"""What a run writes down of itself on each node: `state.json` by the launcher, `agent.json` by the agent."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.procfs import Identity, identity_of, is_alive
from kvlaunch.launch.shm import Segment
from kvlaunch.launch.urls import url_of
from kvlaunch.plan.types import LaunchPlan


class RunState(StrEnum):
    """Where a run stands.

    STARTING  from the first process until the engine has answered and every rank's KV state is confirmed
              (again after a restart of the engine). Then READY, STOPPING or FAILED.
    READY     serving. Then STARTING, STOPPING or FAILED.
    STOPPING  the end was asked for: draining, or waiting for the engine to end. Then STOPPED or FAILED.
    STOPPED   ended as asked, nothing is left. Final.
    FAILED    ended otherwise, nothing is left. Final.
    """

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return not _NEXT[self]

    def may_become(self, other: RunState) -> bool:
        return other in _NEXT[self]


_NEXT: dict[RunState, frozenset[RunState]] = {
    RunState.STARTING: frozenset({RunState.READY, RunState.STOPPING, RunState.FAILED}),
    RunState.READY: frozenset({RunState.STARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.STOPPING: frozenset({RunState.STOPPED, RunState.FAILED}),
    RunState.STOPPED: frozenset(),
    RunState.FAILED: frozenset(),
}


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run failed, as the person who started it was told."""

    error: str
    """Name of the class in kvlaunch.errors."""
    message: str
    hint: str | None = None
    rank: int | None = None
    log_path: str | None = None
    log_tail: str = ""


class StateRecord(msgspec.Struct, kw_only=True):
    """`state.json`. Times are seconds since the Unix epoch."""

    run: str
    name: str
    engine: str
    model: str
    state: RunState
    url: str
    owner: Identity
    """The launcher. While it lives the run is live."""
    started_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    processes: list[Identity] = msgspec.field(default_factory=list)
    """Everything that the run had started when this was written, however deep."""
    shm: list[Segment] = msgspec.field(default_factory=list)
    """Shared memory segments seen in its processes."""
    failure: FailureReport | None = None

    @classmethod
    def starting(cls, plan: LaunchPlan) -> StateRecord:
        """Of a run that this process owns and begins to start."""
        me = identity_of(os.getpid())
        assert me is not None  # the process that asks exists
        return cls(
            run=plan.run,
            name=plan.name,
            engine=plan.engine,
            model=plan.model.name,
            state=RunState.STARTING,
            url=url_of(plan.server),
            owner=me,
            started_at=time.time(),
        )

    @property
    def live(self) -> bool:
        return not self.state.final and is_alive(self.owner)

    def become(self, state: RunState) -> None:
        """Raises RuntimeError where the transition is not one of RunState's."""
        if state is not self.state and not self.state.may_become(state):
            raise RuntimeError(f"run {self.run}: {self.state} may not become {state}")
        self.state = state


class AgentExit(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent's work ended."""

    kind: Literal["stopped", "engine", "rendezvous", "node", "agent"]
    """stopped: it was told to; engine: the engine ended by itself; rendezvous: the nodes did not meet; node: another
    node failed, or was lost; agent: else."""
    message: str = ""
    """For `stopped`: who asked for it, where that was another node."""
    status: int | None = None
    """Exit status of the engine, negative for the signal that ended it."""
    report: FailureReport | None = None
    """For `node`: what failed there."""


class AgentRecord(msgspec.Struct, kw_only=True):
    """`agent.json`."""

    agent: Identity
    node_rank: int | None = None
    """None while the nodes have not met."""
    served: str | None = None
    """Where node 0 serves, once it does; on the other nodes only."""
    epoch: int = 0
    """Restart generation of the engine: 0, then one more for each restart."""
    engine: Identity | None = None
    ended: AgentExit | None = None


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old content or the new, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as f:
        f.write(data)
    draft.replace(path)


def save_state(paths: RunPaths, record: StateRecord) -> None:
    write_atomically(paths.state, msgspec.json.format(msgspec.json.encode(record), indent=2))


def load_state(paths: RunPaths) -> StateRecord | None:
    """The record, or None where there is none (yet), or none that this version can read."""
    try:
        return msgspec.json.decode(paths.state.read_bytes(), type=StateRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def save_agent(paths: RunPaths, record: AgentRecord) -> None:
    write_atomically(paths.agent, msgspec.json.encode(record))


def load_agent(paths: RunPaths) -> AgentRecord | None:
    """The record, or None where there is none (yet)."""
    try:
        return msgspec.json.decode(paths.agent.read_bytes(), type=AgentRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
