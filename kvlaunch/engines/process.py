"""What every process of an engine does that kvlaunch has its hands in: its run, its log, its failure record."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvlaunch.engines import ranks
from kvlaunch.env import RunEnv, read_run_env
from kvlaunch.errors import CompatibilityError
from kvlaunch.launch.failure import record_failure
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.tether import tether
from kvlaunch.plan.types import LaunchPlan, RankPlan


def enter_run() -> tuple[RunEnv, LaunchPlan]:
    """What a process of a run does first: find the run, and end with it.

    Raises:
        CompatibilityError: the environment does not name the run any more.
    """
    run = read_run_env()
    if run is None:
        raise CompatibilityError("This process lost the environment of its run; kvlaunch cannot serve it.")
    tether(run.launcher_pid)
    return run, LaunchPlan.load(run.run_dir / "plan.json")


def enter_rank(resolve: Callable[[LaunchPlan], RankPlan]) -> tuple[RunEnv, LaunchPlan, RankPlan]:
    """The same for the process of a rank, which has its number in its environment and its output in its own log.

    Args:
        resolve: which rank of the plan it is.
    """
    run, plan = enter_run()
    rank = resolve(plan)
    ranks.export_rank(run, plan, rank)
    redirect_output(RunPaths(run.run_dir).rank_log(rank.global_rank))
    log_kvlaunch(f"rank {rank.global_rank}")
    return run, plan, rank


def redirect_output(log: Path) -> None:
    """Send this process's output, and that of what it starts, to its own file."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def log_kvlaunch(who: str) -> None:
    """kvlaunch's own messages go where the process's other lines go."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s [kvlaunch {who}] %(message)s"))
    logger = logging.getLogger("kvlaunch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class FailureRecorder:
    """Keeps the first exception that ends this process as its failure record.

    Args:
        who: `rank3`, `scheduler`.
        rank: global rank, or None for a process that is no rank.
        log: file with the whole story.
    """

    def __init__(self, paths: RunPaths, who: str, rank: int | None, log: Path) -> None:
        self._about = (paths.root, who, rank, log)

    @classmethod
    def of_rank(cls, paths: RunPaths, rank: RankPlan) -> FailureRecorder:
        return cls(paths, f"rank{rank.global_rank}", rank.global_rank, paths.rank_log(rank.global_rank))

    def record(self, error: BaseException) -> None:
        root, who, rank, log = self._about
        record_failure(root, who, rank, error, log)

    def watch(self, *loggers: str) -> None:
        """Record the exceptions that these loggers report.

        By a filter, and not a handler: an engine that configures its logging takes the handlers off its loggers.
        """
        for name in loggers:
            logging.getLogger(name).addFilter(self._see)

    def _see(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception):
            self.record(error)
        return True
