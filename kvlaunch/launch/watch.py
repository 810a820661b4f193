"""What is new in a run's files: events, and with `--verbose` the logs."""

from __future__ import annotations

import time

from kvlaunch.events import Event, read_events
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import load_agent
from kvlaunch.launch.tail import Follower, plain
from kvlaunch.plan.types import LaunchPlan


class EventWatch:
    """Turns events into lines for people: `weights`, `rank 2 of 4`."""

    def __init__(self, paths: RunPaths, plan: LaunchPlan) -> None:
        self._paths = paths
        self._plan = plan
        self._offset = 0
        self._seen: dict[str, set[int]] = {}
        self.pids: dict[int, int] = {}
        """Process ids of the ranks that have said something in this epoch, by global rank."""
        self.epoch = 0
        self.node_rank = 0
        """This node's, once the engine has been started."""
        self.engine_started = 0.0
        """When the engine was last started, by the monotonic clock; 0 where it was not yet."""

    def news(self) -> list[tuple[str, str]]:
        """(phase, text) of each event since the last call."""
        events, self._offset = read_events(self._paths.events, self._offset)
        return [(event.phase, self._text(event)) for event in events]

    def _text(self, event: Event) -> str:
        if event.phase == "engine":
            agent = load_agent(self._paths)
            self.epoch = agent.epoch if agent else 0
            self.node_rank = (agent.node_rank or 0) if agent else 0
            self.engine_started = time.monotonic()
            self._seen.clear()
            self.pids.clear()
        if event.rank is None:
            return event.detail
        self.pids[event.rank] = event.pid
        ranks = self._seen.setdefault(event.phase, set())
        ranks.add(event.rank)
        # A rank's detail is for programs.
        return f"rank {event.rank} ({len(ranks)} of {len(self._plan.nodes[self.node_rank].ranks)})"


class LogWatch:
    """Lines of the engine's log and of the ranks' logs."""

    def __init__(self, paths: RunPaths, plan: LaunchPlan) -> None:
        self._sources = [("engine", Follower(paths.engine_log))]
        self._sources += [(f"rank {r.global_rank}", Follower(paths.rank_log(r.global_rank))) for r in plan.ranks]

    def news(self) -> list[tuple[str, str]]:
        """(source, line) of each line since the last call."""
        return [(source, plain(line)) for source, follower in self._sources for line in follower.lines()]
