"""Is the engine ready: it generates, and every rank's KV cache is in order."""

from __future__ import annotations

import threading

from kvlaunch.errors import KVCommitError
from kvlaunch.launch.kvstate import rank_states
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.probe import NotAnswering, complete_one_token
from kvlaunch.launch.state import load_agent
from kvlaunch.launch.urls import local_address
from kvlaunch.plan.types import LaunchPlan

COMPLETION_TIMEOUT_S = 60.0
STATE_TIMEOUT_S = 5.0


class Readiness(threading.Thread):
    """Asks until the answer is yes. A models endpoint that answers proves nothing and is not asked."""

    def __init__(self, paths: RunPaths, plan: LaunchPlan) -> None:
        super().__init__(name="kvlaunch-readiness", daemon=True)
        self._paths = paths
        self._plan = plan
        self._cancelled = threading.Event()
        self.ready = threading.Event()
        self.last = "nothing was asked yet"
        """Why the engine is not ready, in words."""

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        # Short enough for the launcher to learn of the silence before it gives up.
        timeout_s = min(COMPLETION_TIMEOUT_S, self._plan.timeouts.ready_s / 2)
        pause = 0.05
        while not self._cancelled.wait(pause):
            try:
                self._ask(timeout_s)
            except NotAnswering as exc:
                self.last = str(exc)
                pause = 0.1 if isinstance(exc.__cause__, ConnectionRefusedError) else 0.5
            except KVCommitError as exc:
                self.last = exc.message
                pause = 0.2
            else:
                self.ready.set()
                return

    def _ask(self, timeout_s: float) -> None:
        if self._plan.nnodes > 1 and not self._serves_here():
            return
        host, port = local_address(self._plan.server)
        complete_one_token(host, port, self._plan.model.name, timeout_s=timeout_s)
        if self._plan.kv.mode != "elastic":
            return
        confirmed = {state.global_rank for state in rank_states(self._paths, self._plan, timeout_s=STATE_TIMEOUT_S)}
        missing = sorted({rank.global_rank for rank in self._plan.ranks} - confirmed)
        if missing:
            raise NotAnswering(f"no KV state from ranks {missing}")

    def _serves_here(self) -> bool:
        """Whether this is the node that serves. Where it is another, that one's readiness is this one's.

        Raises:
            NotAnswering: that one is not ready, or it is not known yet which one it is.
        """
        agent = load_agent(self._paths)
        if agent is None or agent.node_rank is None:
            raise NotAnswering("the nodes have not met yet")
        if agent.node_rank > 0 and agent.served is None:
            raise NotAnswering("node 0 does not serve yet")
        return agent.node_rank == 0
