"""What a launcher tells the person who watches it."""

from __future__ import annotations

from typing import Any, Protocol

from kvlaunch.plan.types import LaunchPlan

RunEntry = dict[str, Any]
"""One entry of `kvlaunch ps --json`: run, name, engine, model, state, url, ranks."""


class Reporter(Protocol):
    """Called from the launcher's main thread."""

    def phase(self, elapsed_s: float, phase: str, text: str) -> None:
        """Something was reached: `weights`, `rank 2 of 4`."""

    def note(self, text: str) -> None:
        """A sentence for people."""

    def log(self, source: str, line: str) -> None:
        """A line of a log, with `--verbose`. The source is `engine` or `rank 2`."""

    def ready(self, plan: LaunchPlan, entry: RunEntry) -> None:
        """The engine serves."""


class SilentReporter:
    """For a launcher that nobody watches."""

    def phase(self, elapsed_s: float, phase: str, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def log(self, source: str, line: str) -> None: ...

    def ready(self, plan: LaunchPlan, entry: RunEntry) -> None: ...
