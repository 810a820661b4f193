"""`kvlaunch stop`."""

from __future__ import annotations

import json
import sys

from kvlaunch.launch.ending import stop_run
from kvlaunch.launch.reap import reap_dead_runs
from kvlaunch.launch.runs import Run, find_run, known_runs


def run(run: str | None, *, all_runs: bool, json_output: bool) -> int:
    """End a run, or all, and wait until nothing of it is left.

    Args:
        run: id, unique beginning of one, or name; None for the only live run.
        all_runs: end every live run; none at all is no error then.

    Raises:
        RunNotFoundError: there is no such live run.
        KVLaunchError: something of it could not be ended.
    """
    reap_dead_runs()
    chosen: list[Run] = list(known_runs(live=True)) if all_runs else [find_run(run, live=True)]
    for paths, record in chosen:
        print(f"ending {record.run} ...", file=sys.stderr)
        stop_run(paths, record)
    if json_output:
        print(json.dumps([record.run for _, record in chosen]))
    else:
        for _, record in chosen:
            print(f"{record.run} has ended.")
    return 0
