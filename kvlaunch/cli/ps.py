"""`kvlaunch ps`."""

from __future__ import annotations

import json
import sys

from kvlaunch.cli.progress import console_on, human_bytes
from kvlaunch.launch.reap import reap_dead_runs
from kvlaunch.launch.reporter import RunEntry
from kvlaunch.launch.runs import describe, known_runs, load_plan


def run(*, json_output: bool, all_runs: bool = False) -> int:
    """List the live runs.

    Args:
        all_runs: ended runs whose folder is kept, too.
    """
    reap_dead_runs()
    entries = [describe(paths, record, load_plan(paths)) for paths, record in known_runs(live=not all_runs)]
    if json_output:
        print(json.dumps(entries, indent=2))
    elif entries:
        _print_table(entries)
    else:
        print("No runs.", file=sys.stderr)
    return 0


def _print_table(entries: list[RunEntry]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("run", "name", "engine", "model", "state", "ranks", "KV mapped", "of reserved", "url"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        kv = [rank["kv"] for rank in entry["ranks"] if rank["kv"]]
        table.add_row(
            entry["run"],
            entry["name"],
            entry["engine"],
            entry["model"],
            entry["state"],
            str(len(entry["ranks"])),
            human_bytes(sum(k["mapped_bytes"] for k in kv)) if kv else "-",
            human_bytes(sum(k["reserved_bytes"] for k in kv)) if kv else "-",
            entry["url"],
        )
    console_on(sys.stdout).print(table)
