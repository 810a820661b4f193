"""The file in which an engine writes its manager's numbers down: for benchmarks, tests, and who wants to look."""

from __future__ import annotations

import msgspec

from kvlaunch.kv.manager import KVCacheManager
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import write_atomically


class StatsFile:
    """Written when the engine has become idle: at most once after each time of work, never during it."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.kv_stats
        self._told_steps = 0

    def tell(self, manager: KVCacheManager) -> None:
        """To be called by the manager's owner while it has nothing to do. Raises: background errors of the manager."""
        steps = manager.steps
        if steps.scheduled == steps.finished and steps.scheduled != self._told_steps:
            self._told_steps = steps.scheduled
            write_atomically(self._path, msgspec.json.encode(manager.stats()))
