"""Put into words why a run failed: the failure that came first, with its rank and the end of its log."""

from __future__ import annotations

import signal
from pathlib import Path

from kvlaunch import errors
from kvlaunch.errors import EngineError, KVLaunchError, RendezvousError
from kvlaunch.launch.deaths import Death
from kvlaunch.launch.failure import first_failure
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.state import AgentExit, FailureReport
from kvlaunch.launch.tail import last_lines
from kvlaunch.plan.types import LaunchPlan


def engine_failed(paths: RunPaths, what: str, death: Death | None = None) -> EngineError:
    """The error for an engine that failed.

    Args:
        what: what was noticed from outside, `ended with exit status 1`; the headline only where nothing is known of
            the inside.
        death: the rank whose process ended first, if one did before the engine. It counts where no process has
            recorded a failure before.
    """
    first = first_failure(paths.root)
    if death is not None and (first is None or death.t < first.t):
        message = f"rank {death.rank} (process {death.pid}) was killed or crashed, then the engine {what}."
        rank, log = death.rank, paths.rank_log(death.rank)
    elif first is None:
        message, rank, log = f"The engine {what}.", None, paths.engine_log
    else:
        who = f"rank {first.rank}" if first.rank is not None else first.who
        message, rank, log = f"{who} failed first: {first.exception}", first.rank, Path(first.log)
    tail = last_lines(log)
    if not tail and log != paths.engine_log:
        log, tail = paths.engine_log, last_lines(paths.engine_log)
    return EngineError(message, hint=f"The whole story: {log}", rank=rank, log_path=str(log), log_tail=tail)


def ended_as(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended by itself with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def agent_ended(
    paths: RunPaths, plan: LaunchPlan, ended: AgentExit | None, status: int, death: Death | None = None
) -> KVLaunchError:
    """The error for an agent that ended without having been told to.

    Args:
        ended: what the agent wrote down, None where it had no time to.
        status: exit status of the agent process, negative for the signal that ended it.
        death: the rank whose process ended first.
    """
    if ended is None:
        return EngineError(
            f"The agent that supervises the engine {ended_as(status)}.",
            hint=f"The whole story: {paths.agent_log}",
            log_path=str(paths.agent_log),
            log_tail=last_lines(paths.agent_log),
        )
    if ended.kind == "rendezvous":
        return RendezvousError(
            f"The {plan.nnodes} node(s) did not meet at {plan.rdzv.endpoint} within {plan.rdzv.timeout_s:g} s "
            f"({ended.message}).",
            hint=f"See {paths.agent_log}; rdzv.timeout_s is how long to wait.",
        )
    if ended.report is not None:
        return error_of(ended.report)
    what = ended_as(ended.status) if ended.kind == "engine" else ended.message or "ended"
    restarts = f", after {plan.max_restarts} restart(s)" if plan.max_restarts else ""
    return engine_failed(paths, what + restarts, death)


def report_of(error: KVLaunchError) -> FailureReport:
    """What state.json keeps of an error."""
    details = {}
    if isinstance(error, EngineError):
        details = {"rank": error.rank, "log_path": error.log_path, "log_tail": error.log_tail}
    return FailureReport(error=type(error).__name__, message=error.message, hint=error.hint, **details)  # type: ignore[arg-type]


def error_of(report: FailureReport) -> KVLaunchError:
    """The error that `report_of` was made from."""
    if report.error == EngineError.__name__:
        return EngineError(
            report.message,
            hint=report.hint,
            rank=report.rank,
            log_path=report.log_path,
            log_tail=report.log_tail,
        )
    kind = {cls.__name__: cls for cls in (RendezvousError, errors.ConfigError, errors.PlanError)}.get(report.error)
    return (kind or KVLaunchError)(report.message, hint=report.hint)
