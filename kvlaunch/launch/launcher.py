"""Execute a LaunchPlan: in the foreground, or under a launcher in the background."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

from kvlaunch.errors import KVLaunchError
from kvlaunch.launch.diagnose import error_of
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.preflight import make_model, preflight
from kvlaunch.launch.reap import reap_dead_runs
from kvlaunch.launch.reporter import Reporter
from kvlaunch.launch.runs import describe
from kvlaunch.launch.signals import Signals
from kvlaunch.launch.state import RunState, StateRecord, load_state, save_state, write_atomically
from kvlaunch.launch.supervisor import Supervisor, agent_margin_s
from kvlaunch.launch.watch import EventWatch
from kvlaunch.plan.types import LaunchPlan
from kvlaunch.secret import load_secret, save_secret

END_MARGIN_S = 5.0
"""What a launcher in the background may take to end beyond the grace periods of its plan."""


def launch(plan: LaunchPlan, reporter: Reporter, *, detach: bool = False, verbose: bool = False) -> int:
    """Start the plan's engine and serve until asked to end. To be called from the main thread of a process of its own.

    Args:
        detach: return when the engine is ready; a launcher in the background goes on.
        verbose: pass the lines of all logs to the reporter.

    Returns:
        0 when the run ended as asked after it was ready (detached: when it is ready), else 128 + the number of the
        signal that ended it before.

    Raises:
        KVLaunchError: it could not be started or it failed; nothing of it is left.
    """
    with Signals() as signals:
        reap_dead_runs()
        preflight(plan)
        make_model(plan, signals, reporter)
        if signals.first is not None:
            return 128 + signals.first
        paths = create_run(plan)
        if detach:
            return _launch_in_background(paths, plan, reporter, signals)
        return Supervisor(paths, plan, reporter, verbose=verbose).run(signals)


def create_run(plan: LaunchPlan) -> RunPaths:
    """Make the run's folder with its plan.

    Raises:
        ConfigError: there is no private place for it.
        KVLaunchError: a run of this id exists.
    """
    paths = RunPaths.of(plan.run)
    if paths.plan.exists():
        _make_room(paths, plan)
    paths.create()
    if plan.nnodes > 1 and (secret := load_secret(plan.rdzv.secret_file)) is not None:
        save_secret(secret, paths.secret)
    # The state first: a folder counts as a run once it has a plan, and a run without a live owner is reaped.
    save_state(paths, StateRecord.starting(plan))
    write_atomically(paths.plan, plan.to_json())
    return paths


def _make_room(paths: RunPaths, plan: LaunchPlan) -> None:
    """Remove the files of an ended run that had the same id: on several nodes the user chooses it.

    Raises:
        KVLaunchError: that run lives.
    """
    earlier = load_state(paths)
    if plan.nnodes == 1 or (earlier is not None and earlier.live):
        hint = "Give this one another id."
        if plan.nnodes > 1:
            hint = (
                f"End it (kvlaunch stop {plan.run}), or give this one another rdzv.id. Two nodes of a run on one "
                "machine need an XDG_RUNTIME_DIR each."
            )
        raise KVLaunchError(f"There is a run {plan.run} already.", hint=hint)
    shutil.rmtree(paths.root)


def _launch_in_background(paths: RunPaths, plan: LaunchPlan, reporter: Reporter, signals: Signals) -> int:
    with paths.agent_log.open("ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvlaunch.launch.daemon", str(paths.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    fd = os.pidfd_open(daemon.pid)
    started, events = time.monotonic(), EventWatch(paths, plan)
    try:
        while daemon.poll() is None and signals.first is None:
            signals.wait(0.1, fd)
            for phase, text in events.news():
                reporter.phase(time.monotonic() - started, phase, text)
            record = load_state(paths)
            if record is not None and record.state is RunState.READY:
                reporter.ready(plan, describe(paths, record, plan))
                daemon.returncode = 0  # it goes on without us: nothing to wait for
                return 0
        if signals.first is not None:
            end_daemon(daemon, plan, signals, fd)
            return 128 + signals.first
    finally:
        os.close(fd)
    record = load_state(paths)
    if record is not None and record.state is RunState.STOPPED:
        return 128 + 15  # somebody else ended it
    if record is not None and record.failure is not None:
        raise error_of(record.failure)
    raise KVLaunchError("The launcher in the background ended unexpectedly.", hint=f"See {paths.agent_log}")


def end_daemon(daemon: subprocess.Popen[bytes], plan: LaunchPlan, signals: Signals, fd: int) -> None:
    """End the launcher in the background, by force where it takes too long or a second Ctrl-C says so."""
    daemon.terminate()
    limits = plan.timeouts
    deadline = time.monotonic() + limits.drain_s + limits.term_s + agent_margin_s(plan) + END_MARGIN_S
    while daemon.poll() is None:
        signals.wait(0.1, fd)
        if signals.kill_now or time.monotonic() > deadline:
            daemon.kill()
            daemon.wait()
            reap_dead_runs()
