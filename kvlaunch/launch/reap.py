"""Clean up after launchers that were killed, and keep only the newest ended runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator

from kvlaunch.launch.members import end_everything, remove_traces
from kvlaunch.launch.paths import RunPaths, all_runs, runs_root
from kvlaunch.launch.procfs import Identity
from kvlaunch.launch.state import FailureReport, RunState, StateRecord, load_agent, load_state, save_state

KEPT_ENDED_RUNS = 5
"""The folders of so many ended runs stay, for `kvlaunch logs`."""


def reap_dead_runs() -> list[str]:
    """End what is left of runs whose launcher is gone; runs whose launcher lives are not touched.

    Processes are killed, shared memory and sockets removed; records and logs stay, those of the newest
    KEPT_ENDED_RUNS runs. Does nothing while another kvlaunch does the same.

    Returns:
        Ids of the runs that were found dead.
    """
    reaped: list[str] = []
    with _only_one() as mine:
        if not mine:
            return reaped
        ended = []
        for paths in all_runs():
            record = load_state(paths)
            if record is None or record.live:
                continue
            if not record.state.final:
                _reap(paths, record)
                reaped.append(record.run)
            ended.append(paths)
        for paths in ended[:-KEPT_ENDED_RUNS]:
            shutil.rmtree(paths.root, ignore_errors=True)
    return reaped


def _reap(paths: RunPaths, record: StateRecord) -> None:
    known: list[Identity] = list(record.processes)
    if agent := load_agent(paths):
        known += [agent.agent, *([agent.engine] if agent.engine else [])]
    left = end_everything(paths.root, known, record.shm)
    remove_traces(paths)
    record.processes, record.shm = [process.identity for process in left], []
    record.state = RunState.FAILED
    record.ended_at = time.time()
    record.failure = FailureReport(error="KVLaunchError", message="The launcher was killed.")
    save_state(paths, record)


@contextlib.contextmanager
def _only_one() -> Iterator[bool]:
    """Hold the lock of the runs folder; False where another process holds it, or there is no such folder."""
    try:
        fd = os.open(runs_root() / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)
