"""The launcher's heart: starts the agent, waits until the engine is ready, ends everything.

It owns its process: it handles the signals, it adopts orphans (PR_SET_CHILD_SUBREAPER), and at the end it kills every
descendant.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

from kvlaunch.errors import EngineError, KVLaunchError
from kvlaunch.events import emit
from kvlaunch.launch.deaths import ENGINE, RankWatch, save_death
from kvlaunch.launch.diagnose import agent_ended, engine_failed, report_of
from kvlaunch.launch.failure import first_failure, record_failure
from kvlaunch.launch.hung import HungWatch
from kvlaunch.launch.linux import become_subreaper
from kvlaunch.launch.members import end_everything, remove_traces, run_members
from kvlaunch.launch.nodes import SETTLE_S, TELL_S
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.ports import hold_port
from kvlaunch.launch.probe import requests_in_work
from kvlaunch.launch.procfs import Identity, collect_orphans, send
from kvlaunch.launch.readiness import Readiness
from kvlaunch.launch.reporter import Reporter
from kvlaunch.launch.runs import describe
from kvlaunch.launch.shm import ShmNews, existing, segments_of
from kvlaunch.launch.signals import Signals
from kvlaunch.launch.state import RunState, StateRecord, load_agent, save_state
from kvlaunch.launch.urls import local_address
from kvlaunch.launch.watch import EventWatch, LogWatch
from kvlaunch.plan.types import LaunchPlan

TURN_S = 0.1
READY_TURN_S = 0.5
FAILURE_GRACE_S = 15.0
"""After a rank has recorded a failure in start-up, the engine has so long to end by itself."""
AGENT_START_S = 60.0
"""What the agent may take to start the engine, beyond the time-out of the rendezvous."""
SNAPSHOT_S = 1.0
SNAPSHOT_READY_S = 10.0
AGENT_MARGIN_S = 2.0


def agent_margin_s(plan: LaunchPlan) -> float:
    """What the agent may take beyond the grace period of the engine: to kill, and to tell the other nodes."""
    return AGENT_MARGIN_S + (TELL_S + SETTLE_S if plan.nnodes > 1 else 0.0)


class Supervisor:
    """One run, from the start of its agent until nothing of it is left."""

    def __init__(self, paths: RunPaths, plan: LaunchPlan, reporter: Reporter, *, verbose: bool = False) -> None:
        self.paths = paths
        self.plan = plan
        self.reporter = reporter
        self.record = StateRecord.starting(plan)
        self._started = time.monotonic()
        self._events = EventWatch(paths, plan)
        self._logs = LogWatch(paths, plan) if verbose else None
        self._readiness = Readiness(paths, plan)
        self._hung = HungWatch(paths, plan)
        self._ranks = RankWatch()
        self._snapshot_at = 0.0
        self._shm_news = ShmNews()
        self._failed_at: float | None = None
        self._stopped_by = ""
        """Host on which the end of all nodes was asked for."""

    def run(self, signals: Signals) -> int:
        """Serve until asked to end.

        Returns:
            0 when the end was asked for after the engine was ready, else 128 + the number of the signal that asked.

        Raises:
            KVLaunchError: the run failed; nothing of it is left.
        """
        self._signals = signals
        become_subreaper()
        with self._held_port():
            return self._run()

    def _held_port(self) -> socket.socket:
        """The server's port, the run's own from now on, also between two generations of the engine."""
        try:
            return hold_port(self.plan.server.host, self.plan.server.port)
        except KVLaunchError as exc:  # free a moment ago
            self.record.failure, self.record.ended_at = report_of(exc), time.time()
            self._become(RunState.FAILED)
            raise

    def _run(self) -> int:
        save_state(self.paths, self.record)
        self._spawn_agent()
        try:
            self._serve()
            code = self._stop()
        except BaseException as exc:
            self._finish(exc)
            raise
        self._finish(None)
        return code

    def _spawn_agent(self) -> None:
        command = [self.plan.engine_python, "-P", "-m", "kvlaunch.launch.agent"]
        with self.paths.agent_log.open("ab") as log:
            self._agent = subprocess.Popen(
                [*command, str(self.paths.root), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._agent_fd = os.pidfd_open(self._agent.pid)
        emit(self.paths.events, "spawned", detail=f"agent, pid {self._agent.pid}")

    def _serve(self) -> None:
        """Return when the end was asked for; raise when the run has failed."""
        self._readiness.start()
        while self._signals.first is None:
            # Whoever ends wakes the wait up; an engine that serves needs no closer look.
            quiet = self.record.state is RunState.READY and self._logs is None
            self._signals.wait(READY_TURN_S if quiet else TURN_S, self._agent_fd, *self._ranks.fds)
            self._look_for_deaths()
            self._look()
            if (status := self._agent.poll()) is not None:
                agent = load_agent(self.paths)
                ended = agent.ended if agent else None
                if ended is not None and ended.kind == "stopped" and ended.message:
                    self._stopped_by = ended.message
                    return
                raise agent_ended(self.paths, self.plan, ended, status, self._ranks.first)
            if self.record.state is RunState.STARTING:
                self._look_at_start()
            elif self._hung.hung:
                self._end_hung_engine()

    def _end_hung_engine(self) -> None:
        """Its agent starts it again, or ends; the hung rank is what it failed of."""
        rank, reason = min(self._hung.hung.items())
        self._hung = HungWatch(self.paths, self.plan)
        error = TimeoutError(f"it does not answer: {reason} (timeouts.hung_s={self.plan.timeouts.hung_s:g})")
        record_failure(self.paths.root, f"rank{rank}", rank, error, self.paths.rank_log(rank))
        self.reporter.note(f"rank {rank} hangs: the engine is ended")
        if (agent := load_agent(self.paths)) and agent.engine:
            send(agent.engine, signal.SIGKILL)

    def _look_for_deaths(self) -> None:
        known = self._ranks.first
        self._ranks.look()
        if known is None and self._ranks.first is not None and self.plan.nnodes > 1:
            save_death(self.paths, self._ranks.first)

    def _look(self) -> None:
        started = False
        for phase, text in self._events.news():
            self.reporter.phase(time.monotonic() - self._started, phase, text)
            started |= phase == "engine"
            self._snapshot_at = min(self._snapshot_at, time.monotonic() + TURN_S)
        if started:
            self._ranks.close()
            if self._events.epoch > 0 and self.record.state in (RunState.STARTING, RunState.READY):
                self._await_readiness_again()
        self._ranks.follow(self._events.pids)
        if not self._ranks.knows(ENGINE) and (agent := load_agent(self.paths)) and agent.engine:
            self._ranks.follow({ENGINE: agent.engine[0]})
        if self._logs:
            for source, line in self._logs.news():
                self.reporter.log(source, line)
        if self.record.state.final:  # nothing is left, and removing the segments was the last change of theirs
            return
        # A process that is killed right after it made a segment leaves it to whoever has seen it.
        if time.monotonic() >= self._snapshot_at or self._shm_news.any():
            self._snapshot()

    def _await_readiness_again(self) -> None:
        self._hung.cancel()
        self._readiness.cancel()
        self._readiness = Readiness(self.paths, self.plan)
        self._readiness.start()
        self._failed_at = None
        self._become(RunState.STARTING)

    def _look_at_start(self) -> None:
        now = time.monotonic()
        if self._readiness.ready.is_set():
            self._ready()
            return
        if self._failed_at is None and first_failure(self.paths.root):
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > FAILURE_GRACE_S:
            raise engine_failed(self.paths, "failed in start-up and did not end", self._ranks.first)
        if self._events.engine_started:  # a restarted engine has the whole time again
            since, limit_s = self._events.engine_started, self.plan.timeouts.ready_s
        else:
            since, limit_s = self._started, self.plan.rdzv.timeout_s + AGENT_START_S
        if now - since > limit_s:
            raise self._not_ready(limit_s)

    def _not_ready(self, limit_s: float) -> EngineError:
        if not self._events.engine_started:
            return engine_failed(self.paths, f"was not started by its agent within {limit_s:g} s")
        what = f"was not ready after {limit_s:g} s (timeouts.ready_s): {self._readiness.last}"
        return engine_failed(self.paths, what, self._ranks.first)

    def _ready(self) -> None:
        self._snapshot()  # first: who sees READY may rely on it
        first_time = self.record.ready_at is None
        self.record.ready_at = time.time()
        agent = load_agent(self.paths)
        self.record.url = (agent.served if agent else None) or self.record.url
        self._become(RunState.READY)
        emit(self.paths.events, "ready", detail=self.record.url)
        self._look()
        self._hung = HungWatch(self.paths, self.plan)
        self._hung.start()
        if first_time:
            self.reporter.ready(self.plan, describe(self.paths, self.record, self.plan))
        else:
            self.reporter.note(f"serving again at {self.record.url}")

    def _become(self, state: RunState) -> None:
        self.record.become(state)
        save_state(self.paths, self.record)

    def _known(self) -> list[Identity]:
        """Processes of the run that have been seen, the agent and the engine first."""
        agent = load_agent(self.paths)
        first = [agent.agent, *([agent.engine] if agent.engine else [])] if agent else []
        return list(dict.fromkeys([*first, *self.record.processes]))

    def _snapshot(self) -> None:
        """Write down what the run consists of, for whoever must clean up after a launcher that was killed."""
        ready = self.record.state is RunState.READY
        self._snapshot_at = time.monotonic() + (SNAPSHOT_READY_S if ready else SNAPSHOT_S)
        members = run_members(self.paths.root, self._known(), roots=[os.getpid()])
        processes = [process.identity for process in members if not process.zombie]
        # What was seen once counts until it is gone: a process may have ended without removing it.
        shm = sorted(existing(self.record.shm) | segments_of(process.pid for process in members))
        if processes != self.record.processes or shm != self.record.shm:
            self.record.processes, self.record.shm = processes, shm
            save_state(self.paths, self.record)

    def _stop(self) -> int:
        was_ready = self.record.ready_at is not None
        signum = self._signals.first
        self._snapshot()
        self._become(RunState.STOPPING)
        self._readiness.cancel()
        self._hung.cancel()
        if signum is None:  # _serve returns for a signal, here or on another node
            emit(self.paths.events, "stopping", detail=f"on {self._stopped_by}")
            self.reporter.note(f"ended, as it was on {self._stopped_by}")
            return 0 if was_ready else 128 + signal.SIGTERM
        emit(self.paths.events, "stopping", detail=signum.name)
        self.reporter.note(f"{signum.name}: ending (Ctrl-C again kills at once)")
        if was_ready:
            self._drain()
        if not self._signals.kill_now:
            self._agent.terminate()
            self._wait_for_agent(self.plan.timeouts.term_s + agent_margin_s(self.plan))
        return 0 if was_ready else 128 + signum

    def _drain(self) -> None:
        """Give running requests up to drain_s to finish."""
        deadline = time.monotonic() + self.plan.timeouts.drain_s
        host, port = local_address(self.plan.server)
        while not self._signals.kill_now and self._agent.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0 or not requests_in_work(host, port, timeout_s=min(1.0, left)):
                return
            self._signals.wait(min(TURN_S, left), self._agent_fd)

    def _wait_for_agent(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._agent.poll() is None and not self._signals.kill_now and time.monotonic() < deadline:
            self._signals.wait(TURN_S, self._agent_fd)
            self._look()

    def _finish(self, exc: BaseException | None) -> None:
        """Leave nothing behind: processes, shared memory, sockets."""
        self._readiness.cancel()
        self._hung.cancel()
        left = end_everything(self.paths.root, self._known(), self.record.shm, roots=[os.getpid()])
        if not left:
            self._agent.wait()
        os.close(self._agent_fd)
        collect_orphans(keep=[self._agent.pid])
        remove_traces(self.paths)
        self.record.ended_at = time.time()
        self.record.processes = [process.identity for process in left]
        self.record.shm = []
        if isinstance(exc, KVLaunchError):
            self.record.failure = report_of(exc)
        if exc is None:
            self.record.state = RunState.STOPPED
            emit(self.paths.events, "stopped")
        else:
            self.record.state = RunState.FAILED
            emit(self.paths.events, "failed", detail=str(exc))
        save_state(self.paths, self.record)
        self._look()
        self._ranks.close()
        if left:
            self.reporter.note(f"still alive, though killed: processes {[p.pid for p in left]} (kernel waits for them)")
