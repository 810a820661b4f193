"""`kvlaunch logs`."""

from __future__ import annotations

import sys
import time

from kvlaunch.errors import RunNotFoundError
from kvlaunch.launch.reap import reap_dead_runs
from kvlaunch.launch.runs import find_run
from kvlaunch.launch.state import load_state
from kvlaunch.launch.tail import Follower

FOLLOW_S = 0.2


def run(run: str | None, *, rank: int | None, follow: bool) -> int:
    """Print the engine's log, or that of one rank.

    Args:
        run: id, unique beginning of one, or name; None for the newest, ended ones included.
        rank: global rank.
        follow: go on until the run ends or Ctrl-C.

    Raises:
        RunNotFoundError: there is no such run, or it has no such rank.
    """
    reap_dead_runs()
    paths, record = find_run(run, live=False)
    log = paths.engine_log if rank is None else paths.rank_log(rank)
    if not log.exists() and not (follow and record.live):
        kept = sorted(path.name for path in paths.logs.glob("*.log"))
        raise RunNotFoundError(f"Run {record.run} has no {log.name}.", hint=f"It has: {', '.join(kept) or 'none'}.")
    follower = Follower(log)
    try:
        while True:
            # Whether it lives is asked first: what it wrote last is then read in the same turn.
            now = load_state(paths)
            live = follow and now is not None and now.live
            for line in follower.lines(rest=not live):
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
            if not live:
                return 0
            time.sleep(FOLLOW_S)
    except KeyboardInterrupt:
        return 0
