"""The launcher in the background: `python -m kvlaunch.launch.daemon RUN_DIR`. It takes over a run that was created."""

from __future__ import annotations

import sys
from pathlib import Path

from kvlaunch.errors import KVLaunchError
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.reporter import SilentReporter
from kvlaunch.launch.signals import Signals
from kvlaunch.launch.supervisor import Supervisor
from kvlaunch.plan.types import LaunchPlan


def main() -> int:
    paths = RunPaths(Path(sys.argv[1]))
    with Signals() as signals:
        try:
            return Supervisor(paths, LaunchPlan.load(paths.plan), SilentReporter()).run(signals)
        except KVLaunchError as exc:
            print(exc, file=sys.stderr)
            return exc.exit_code


if __name__ == "__main__":
    sys.exit(main())
