"""`kvlaunch limit`."""

from __future__ import annotations

import json
import sys

from kvlaunch.cli.progress import console_on, human_bytes
from kvlaunch.config.units import parse_bytes
from kvlaunch.errors import ConfigError
from kvlaunch.kv.ipc.messages import RankState
from kvlaunch.launch.kvstate import limit_ranks
from kvlaunch.launch.reap import reap_dead_runs
from kvlaunch.launch.runs import find_run, load_plan
from kvlaunch.launch.state import RunState
from kvlaunch.plan.types import LaunchPlan

NO_LIMIT = "none"
TIMEOUT_S = 10.0
"""A step in flight is waited for: a long prefill takes seconds."""


def run(size: str, run: str | None, *, json_output: bool) -> int:
    """Change how much KV memory each rank of a run may keep mapped, and wait until every rank has taken it.

    Args:
        size: bytes a rank, as in `256MiB`, or `none`.
        run: id, unique beginning of one, or name; None for the only live run.

    Raises:
        RunNotFoundError: there is no such live run.
        ConfigError: the size is none, too small for a page, or the run takes no limit.
        KVCommitError: a rank did not take it.
    """
    reap_dead_runs()
    paths, record = find_run(run, live=True)
    plan = load_plan(paths)
    if plan is None or record.state is not RunState.READY:
        raise ConfigError(f"Run {record.run} is not ready: it is {record.state.value}.", hint="Wait until it serves.")
    pages = _pages(size, plan)
    states = limit_ranks(paths, plan, pages, timeout_s=TIMEOUT_S)
    _print_json(plan, states) if json_output else _print_table(plan, states)
    return 0


def _pages(size: str, plan: LaunchPlan) -> int | None:
    if plan.kv.mode != "elastic":
        raise ConfigError(f"Run {plan.run} has kv={plan.kv.mode}: its KV memory is all there all the time.")
    if plan.engine != "sglang":
        raise ConfigError(
            f"Run {plan.run} has engine={plan.engine}, whose limit cannot be changed while it runs yet.",
            hint="Start it with less kv.reserve.",
        )
    if size == NO_LIMIT:
        return None
    page_bytes = max(plan.page_bytes)
    pages = parse_bytes(size, what="the limit") // page_bytes
    if pages < 1:
        raise ConfigError(
            f"A limit of {size} is less than a page of this run, {human_bytes(page_bytes)} a rank.",
            hint=f"Give at least that, or `{NO_LIMIT}`.",
        )
    return pages


def _limit_bytes(plan: LaunchPlan, state: RankState) -> int | None:
    pages = state.limit_pages
    return None if pages is None else pages * plan.page_bytes[state.global_rank]


def _print_json(plan: LaunchPlan, states: list[RankState]) -> None:
    ranks = [
        {
            "global_rank": state.global_rank,
            "limit_bytes": _limit_bytes(plan, state),
            "mapped_bytes": state.mapped_bytes,
            "reserved_bytes": state.reserved_bytes,
        }
        for state in states
    ]
    print(json.dumps({"run": plan.run, "ranks": ranks}, indent=2))


def _print_table(plan: LaunchPlan, states: list[RankState]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("rank", "limit", "mapped", "of reserved"):
        table.add_column(column)
    for state in states:
        limit = _limit_bytes(plan, state)
        table.add_row(
            str(state.global_rank),
            NO_LIMIT if limit is None else human_bytes(limit),
            human_bytes(state.mapped_bytes),
            human_bytes(state.reserved_bytes),
        )
    console_on(sys.stdout).print(table)
