"""End a run from another process."""

from __future__ import annotations

import signal
import time

from kvlaunch.errors import KVLaunchError
from kvlaunch.launch.launcher import END_MARGIN_S
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.procfs import is_alive, send
from kvlaunch.launch.reap import reap_dead_runs
from kvlaunch.launch.runs import load_plan
from kvlaunch.launch.state import StateRecord
from kvlaunch.launch.supervisor import agent_margin_s


def stop_run(paths: RunPaths, record: StateRecord) -> None:
    """Ask the run's launcher to end, and wait for it; past all of the run's grace periods it is killed.

    Raises:
        KVLaunchError: the launcher cannot be signalled, or is still alive after SIGKILL.
    """
    plan = load_plan(paths)
    limit = END_MARGIN_S
    limit += plan.timeouts.drain_s + plan.timeouts.term_s + agent_margin_s(plan) if plan else 0.0
    if not send(record.owner, signal.SIGTERM) and is_alive(record.owner):
        raise KVLaunchError(f"Process {record.owner[0]}, the launcher of {record.run}, cannot be signalled.")
    if _gone(record, limit):
        return
    send(record.owner, signal.SIGKILL)
    if not _gone(record, END_MARGIN_S):
        raise KVLaunchError(f"Process {record.owner[0]}, the launcher of {record.run}, does not end.")
    reap_dead_runs()


def _gone(record: StateRecord, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while is_alive(record.owner):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
