"""The agent of a node: `python -m kvlaunch.launch.agent RUN_DIR LAUNCHER_PID`, in the engine's environment.

torch.distributed.elastic is the rendezvous and the supervisor; this module tells it what to start, ends the engine
with everything that the engine started, and ends it too when the launcher dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlaunch import env
from kvlaunch.errors import EngineError, RendezvousError
from kvlaunch.events import emit
from kvlaunch.launch.diagnose import error_of, report_of
from kvlaunch.launch.failure import archive_failures
from kvlaunch.launch.linux import become_subreaper
from kvlaunch.launch.members import end_everything, remove_sockets, remove_traces
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.procfs import Identity, collect_orphans, descendants, identity_of, scan
from kvlaunch.launch.state import AgentExit, AgentRecord, RunState, load_state, save_agent, save_state
from kvlaunch.launch.tether import wait_for_end
from kvlaunch.plan.types import LaunchPlan

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server import WorkerGroup
    from torch.distributed.elastic.agent.server.api import RunResult

    from kvlaunch.launch.across import AcrossNodes

MONITOR_INTERVAL_S = 0.2
CHILDREN_GRACE_S = 1.0
"""After the engine has ended as asked, its children (a resource tracker, say) may take so long to follow."""


class Agent:
    """One node's part of a run."""

    def __init__(self, paths: RunPaths, plan: LaunchPlan, launcher_pid: int) -> None:
        me = identity_of(os.getpid())
        assert me is not None  # the process that asks exists
        self.paths = paths
        self.plan = plan
        self.launcher_pid = launcher_pid
        self.record = AgentRecord(agent=me, node_rank=0 if plan.nnodes == 1 else None)
        self.across: AcrossNodes | None = None
        """The other nodes, where there are some."""
        self._rendezvous: object = None
        """Kept until the process ends: the store may live in it, and the other nodes read there how this one ended."""
        self._ending = threading.Lock()

    @property
    def known(self) -> list[Identity]:
        return [self.record.engine] if self.record.engine else []

    def run(self) -> int:
        """Returns the exit code of the agent process."""
        save_agent(self.paths, self.record)
        threading.Thread(target=self._follow_launcher, name="kvlaunch-launcher", daemon=True).start()
        ended = self._supervise()
        with self._ending:  # from here on the launcher's death changes nothing
            self.kill_children()
            if self.across is not None:
                ended = self.across.settle(ended)
            self._save_end(ended)
        return _exit_code(ended)

    def end_now(self, ended: AgentExit) -> None:
        """End everything from another thread than the main one, which may hang."""
        with self._ending:
            try:
                state = load_state(self.paths)
                end_everything(self.paths.root, self.known, state.shm if state else (), roots=[os.getpid()])
                self._save_end(ended)
            finally:
                os._exit(_exit_code(ended))

    def _save_end(self, ended: AgentExit) -> None:
        self.record.ended = ended
        save_agent(self.paths, self.record)

    def before_start(self, restart: int) -> None:
        """Clear what an earlier epoch has left, and announce the new one before its processes say anything.

        Args:
            restart: how often the engine was started before, on this node.
        """
        meeting = self.across.meeting if self.across else None
        if restart > 0:
            archive_failures(self.paths.root, self.record.epoch)
            remove_sockets(self.paths)
            self.paths.death.unlink(missing_ok=True)
        self.record.epoch = meeting.epoch if meeting else restart
        self.record.node_rank = meeting.node_rank if meeting else 0
        self.record.engine = self.record.served = None
        save_agent(self.paths, self.record)
        # For `enter`, which becomes the engine.
        os.environ[env.EPOCH] = str(self.record.epoch)
        os.environ[env.NODE_RANK] = str(self.record.node_rank)
        if self.across is not None:
            os.environ[env.LOCAL_ADDR] = self.across.addr
        restarts = f", restart {restart} of {self.plan.max_restarts}" if restart else ""
        emit(self.paths.events, "engine", detail=f"{self.plan.engine} starts{restarts}")

    def after_start(self, pid: int) -> None:
        self.record.engine = identity_of(pid)
        save_agent(self.paths, self.record)

    def kill_children(self, *, grace_s: float = 0.0) -> None:
        """SIGKILL every descendant that is still there after `grace_s` seconds."""
        me = os.getpid()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            table = scan()
            if all(table[pid].zombie for pid in descendants([me], table)):
                break
            time.sleep(0.02)
        end_everything(self.paths.root, self.known, roots=[me])
        collect_orphans(keep=[pid for pid, _ in self.known])

    def _follow_launcher(self) -> None:
        wait_for_end(self.launcher_pid)
        with self._ending:
            try:
                self._end_without_launcher()
            finally:  # whatever is wrong with the run's folder
                os._exit(1)

    def _end_without_launcher(self) -> None:
        state = load_state(self.paths)
        known = self.known + (state.processes if state else [])
        end_everything(self.paths.root, known, state.shm if state else (), roots=[os.getpid()])
        remove_traces(self.paths)
        emit(self.paths.events, "failed", detail="the launcher was killed")
        if state and not state.state.final:
            state.state = RunState.FAILED
            state.ended_at = time.time()
            save_state(self.paths, state)
        if self.across is not None:
            self.across.report_failure("The launcher was killed.")

    def _supervise(self) -> AgentExit:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError
        from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError

        try:
            if self.plan.nnodes > 1:
                from kvlaunch.launch.across import AcrossNodes

                self.across = AcrossNodes(self)
            result = self._run_elastic()
        except SignalException:
            return AgentExit(kind="stopped")
        except TorchRendezvousError as exc:
            if self.across is not None:
                return self.across.not_met(reached=not isinstance(exc, RendezvousConnectionError))
            return AgentExit(kind="rendezvous", message=f"{type(exc).__name__}: {exc}")
        except RendezvousError as exc:
            return AgentExit(kind="node", report=report_of(exc))
        if result is None:
            return AgentExit(kind="stopped")
        return AgentExit(kind="engine", status=next((one.exitcode for one in result.failures.values()), 0))

    def _run_elastic(self) -> RunResult | None:
        from torch.distributed.elastic.agent.server import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        rdzv = self.plan.rdzv
        timeout = max(1, round(rdzv.timeout_s))
        # join_timeout and read_timeout are c10d's, rank and timeout are the static backend's.
        options: dict[str, Any] = {
            "join_timeout": timeout,
            "read_timeout": timeout,
            "rank": rdzv.node_rank or 0,
            "timeout": timeout,
        }
        options |= self.across.rendezvous_options() if self.across else {"is_host": True}
        local_addr = self.across.addr if self.across else "localhost"
        handler = get_rendezvous_handler(
            RendezvousParameters(
                backend=rdzv.backend,
                endpoint=self.across.endpoint if self.across else rdzv.endpoint,
                run_id=rdzv.id,
                min_nodes=self.plan.nnodes,
                max_nodes=self.plan.nnodes,
                local_addr=local_addr,
                **options,
            )
        )
        self._rendezvous = handler
        if self.across is not None:
            emit(self.paths.events, "rendezvous", detail=f"{rdzv.endpoint}, waiting for {self.plan.nnodes} nodes")
            if rdzv.backend == "c10d":
                self.across.arrived()
        spec = WorkerSpec(
            role="engine",
            local_world_size=1,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=("-m", "kvlaunch.launch.enter", str(self.paths.root)),
            max_restarts=self.plan.max_restarts,
            monitor_interval=MONITOR_INTERVAL_S,
            local_addr=local_addr,
        )
        elastic = _elastic_agent(self, spec, DefaultLogsSpecs(log_dir=os.devnull))
        try:
            result: RunResult | None = elastic.run()
        finally:
            handler.shutdown()
        return result


def _elastic_agent(agent: Agent, spec: Any, logs_specs: Any) -> Any:
    """A LocalElasticAgent that leaves no process behind: torch is imported only here."""
    from torch.distributed.elastic.agent.server import WorkerState
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException

    class EngineAgent(LocalElasticAgent):  # type: ignore[misc]
        """Ends the engine by SIGTERM to the engine's own process, as its operator would, before anything harder."""

        _starts = 0

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            super()._rendezvous(worker_group)
            if agent.across is not None:
                meeting = agent.across.meet(worker_group.store, worker_group.group_rank)
                worker_group.master_addr, worker_group.master_port = meeting.master.addr, meeting.master.port
            emit(
                agent.paths.events,
                "rendezvous",
                detail=f"{worker_group.group_world_size} of {agent.plan.nnodes} node(s)",
            )

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            agent.before_start(self._starts)
            self._starts += 1
            pids: dict[int, Any] = super()._start_workers(worker_group)
            agent.after_start(pids[0])
            return pids

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            if result.state == WorkerState.SUCCEEDED:
                # A server has no end of its own. vLLM exits with 0 after one of its ranks was killed.
                return RunResult(state=WorkerState.FAILED)
            return result

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
            grace_s = 0.0
            if agent.across is not None and isinstance(sys.exc_info()[1], SignalException):
                agent.across.announce_stop()
            if self._engine_runs():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the launcher can still kill
                ended = self._end_engine(agent.plan.timeouts.term_s)
                grace_s = CHILDREN_GRACE_S if ended else 0.0
            agent.kill_children(grace_s=grace_s)
            super()._shutdown(signal.SIGKILL)

        def _engine_runs(self) -> bool:
            return self._pcontext is not None and any(
                handler.proc.poll() is None for handler in self._pcontext.subprocess_handlers.values()
            )

        def _end_engine(self, timeout_s: float) -> bool:
            deadline = time.monotonic() + timeout_s
            for pid in self._pcontext.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            while self._engine_runs() and time.monotonic() < deadline:
                time.sleep(0.02)
            return not self._engine_runs()

    return EngineAgent(spec, logs_specs)


def _exit_code(ended: AgentExit) -> int:
    if ended.report is not None:
        return error_of(ended.report).exit_code
    return {"stopped": 0, "rendezvous": RendezvousError.exit_code, "engine": EngineError.exit_code}.get(ended.kind, 1)


def main() -> int:
    paths, launcher_pid = RunPaths(Path(sys.argv[1])), int(sys.argv[2])
    if os.getppid() != launcher_pid:  # it ended before the agent could watch it
        return 1
    become_subreaper()
    os.environ[env.AGENT_PID] = str(os.getpid())
    os.environ[env.LAUNCHER_PID] = str(launcher_pid)
    # The engine makes its own stores: it must not take the agent's for its rank 0's (torch's env:// and tcp:// do).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return Agent(paths, LaunchPlan.load(paths.plan), launcher_pid).run()


if __name__ == "__main__":
    sys.exit(main())
