"""Find runs, and describe one."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvlaunch.errors import KVCommitError, RunNotFoundError
from kvlaunch.events import read_events
from kvlaunch.launch.kvstate import rank_states
from kvlaunch.launch.paths import RunPaths, all_runs
from kvlaunch.launch.reporter import RunEntry
from kvlaunch.launch.state import RunState, StateRecord, load_state
from kvlaunch.plan.types import LaunchPlan

Run = tuple[RunPaths, StateRecord]


def known_runs(*, live: bool = False) -> Iterator[Run]:
    """Runs of this user that have a state, oldest first.

    Args:
        live: only those whose launcher lives.
    """
    for paths in all_runs():
        record = load_state(paths)
        if record is not None and (record.live or not live):
            yield paths, record


def find_run(wanted: str | None, *, live: bool) -> Run:
    """The run of an id, a unique beginning of one, or a name.

    Args:
        wanted: None means the only live run, or, where ended ones count too, the newest.
        live: only live runs count.

    Raises:
        RunNotFoundError: there is none, or more than one.
    """
    runs = list(known_runs(live=live))
    kind = "live run" if live else "run"
    if wanted is None:
        if not runs:
            raise RunNotFoundError(f"There is no {kind}.", hint="Start one: kvlaunch engine=vllm model=tiny-qwen3")
        if live and len(runs) > 1:
            raise RunNotFoundError(f"There are {len(runs)} live runs.", hint=f"Name one: {_names(runs)}")
        return runs[-1]
    for matches in (
        [r for r in runs if r[1].run == wanted],
        [r for r in runs if r[1].name == wanted],
        [r for r in runs if r[1].run.startswith(wanted)],
    ):
        # An ended run does not stand in the way of a live one of the same name.
        alive = [r for r in matches if r[1].live] or matches[-1:]
        if len(alive) > 1:
            raise RunNotFoundError(f"{wanted!r} fits {len(alive)} runs.", hint=f"Name one: {_names(alive)}")
        if alive:
            return alive[0]
    raise RunNotFoundError(
        f"There is no {kind} {wanted!r}.", hint=f"There are: {_names(runs)}" if runs else "There is none at all."
    )


def _names(runs: list[Run]) -> str:
    return ", ".join(f"{record.run} ({record.name})" for _, record in runs)


def load_plan(paths: RunPaths) -> LaunchPlan | None:
    """The run's plan, or None where it is gone or of another version."""
    try:
        return LaunchPlan.load(paths.plan)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def rank_pids(paths: RunPaths) -> dict[int, int]:
    """Process ids of the ranks that have said something, by global rank."""
    events, _ = read_events(paths.events)
    return {event.rank: event.pid for event in events if event.rank is not None}


def describe(paths: RunPaths, record: StateRecord, plan: LaunchPlan | None, *, timeout_s: float = 2.0) -> RunEntry:
    """One entry of `kvlaunch ps --json`. `pid` and `kv` of a rank are null where they are not known (yet)."""
    kv = {}
    if plan and plan.kv.mode == "elastic" and record.state is RunState.READY and record.live:
        try:
            kv = {state.global_rank: state for state in rank_states(paths, plan, timeout_s=timeout_s)}
        except KVCommitError:
            kv = {}  # the engine may just be ending: everything else is known
    pids = rank_pids(paths)
    ranks = []
    for rank in plan.ranks if plan else ():
        state = kv.get(rank.global_rank)
        ranks.append(
            {
                "global_rank": rank.global_rank,
                "pid": state.pid if state else pids.get(rank.global_rank),
                "kv": {"reserved_bytes": state.reserved_bytes, "mapped_bytes": state.mapped_bytes} if state else None,
            }
        )
    return {
        "run": record.run,
        "name": record.name,
        "engine": record.engine,
        "model": record.model,
        "state": record.state.value,
        "url": record.url,
        "ranks": ranks,
    }
