"""Does every rank of this node still answer: a process that hangs ends nothing by itself, and requests wait for it."""

from __future__ import annotations

import threading
import time

from kvlaunch.errors import KVCommitError
from kvlaunch.launch.kvstate import rank_states
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.types import LaunchPlan

LOOKS = 6
"""Looks within timeouts.hung_s."""


class HungWatch(threading.Thread):
    """Asks this node's KV listeners for the state of their ranks, again and again, while the engine serves.

    A listener and its peers answer from threads of their own: a rank that computes for long answers all the same. With
    kv=static there are no listeners, and nothing is asked. Nor is it on a node whose every rank has its stage's leader
    on another one, which is asked there.
    """

    def __init__(self, paths: RunPaths, plan: LaunchPlan) -> None:
        super().__init__(name="kvlaunch-hung", daemon=True)
        self._paths = paths
        self._plan = plan
        self._stop = threading.Event()
        self.hung: dict[int, str] = {}
        """Global rank -> why it counts as hung. Filled once, when the time is over."""

    def start(self) -> None:
        if self._plan.kv.mode == "elastic":
            super().start()

    def cancel(self) -> None:
        """It is not waited for."""
        self._stop.set()

    def run(self) -> None:
        every_s = self._plan.timeouts.hung_s / LOOKS
        # A leader waits for its ranks too, and only then can it say which one does not answer.
        timeout_s = max(every_s, self._plan.kv.commit_timeout_s)
        answered = time.monotonic()
        while not self._stop.wait(every_s):
            try:
                asked = rank_states(self._paths, self._plan, timeout_s=timeout_s, here=True)
            except KVCommitError as error:
                if time.monotonic() - answered >= self._plan.timeouts.hung_s and not self._stop.is_set():
                    self.hung = error.failures
                    return
            else:
                if not asked:
                    return
                answered = time.monotonic()
