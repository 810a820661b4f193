"""What a person sees while a run starts and when it is ready."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, TextIO

from kvlaunch.launch.reporter import RunEntry
from kvlaunch.plan.types import LaunchPlan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table


def console_on(stream: TextIO) -> Console:
    """A console that never breaks a line; tables are fitted to a terminal's width, and have room in a pipe."""
    from rich.console import Console

    return Console(file=stream, highlight=False, soft_wrap=True, width=None if stream.isatty() else 200)


class TerminalReporter:
    """Progress on stderr, a spinner too where that is a terminal; what is asked for (URL, table, JSON) on stdout."""

    def __init__(self, *, json_output: bool = False, err: TextIO | None = None, out: TextIO | None = None) -> None:
        self._json = json_output
        self._err = console_on(err or sys.stderr)
        self._out = console_on(out or sys.stdout)
        self._status: Status | None = None

    def __enter__(self) -> TerminalReporter:
        if self._err.is_terminal:
            self._status = self._err.status("starting")
            self._status.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_spinner()

    def phase(self, elapsed_s: float, phase: str, text: str) -> None:
        self._err.print(f"{elapsed_s:7.1f} s  {phase:<10}  {text}", markup=False)
        if self._status is not None:
            self._status.update(f"{phase} {text}".replace("[", r"\["))

    def note(self, text: str) -> None:
        self._err.print(text, markup=False)

    def log(self, source: str, line: str) -> None:
        self._err.print(f"[{source}] {line}", markup=False)

    def ready(self, plan: LaunchPlan, entry: RunEntry) -> None:
        self._stop_spinner()
        people = self._err if self._json else self._out
        print_ready(people, plan, entry)
        if self._json:
            self._out.print(json.dumps(entry), markup=False)
        self._out.file.flush()

    def _stop_spinner(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def curl_line(plan: LaunchPlan, url: str) -> str:
    """A request to try, ready to be pasted into a shell."""
    body = json.dumps({"model": plan.model.name, "prompt": "Hello", "max_tokens": 16})
    return f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def print_ready(console: Console, plan: LaunchPlan, entry: RunEntry) -> None:
    """The block that says where the server is and what its ranks hold."""
    console.print(f"\n{plan.model.name} is served by {plan.engine} at {entry['url']}  (run {plan.run})\n", markup=False)
    console.print(f"  {curl_line(plan, entry['url'])}\n", markup=False)
    console.print(rank_table(plan, entry))


def rank_table(plan: LaunchPlan, entry: RunEntry) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("rank", "stage", "tp", "device", "pid", "layers", "KV mapped", "of reserved"):
        table.add_column(column, justify="left" if column == "device" else "right", no_wrap=True)
    for rank, shown in zip(plan.ranks, entry["ranks"], strict=True):
        kv = shown["kv"]
        table.add_row(
            str(rank.global_rank),
            str(rank.pp_rank),
            str(rank.tp_rank),
            rank.device,
            str(shown["pid"] or "-"),
            f"{rank.layers[0]}-{rank.layers[1]}",
            human_bytes(kv["mapped_bytes"]) if kv else "-",
            human_bytes(kv["reserved_bytes"]) if kv else "-",
        )
    return table


def human_bytes(nbytes: int) -> str:
    """`1.5 GiB`; whole numbers without a fraction."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    unit = units.pop(0)
    while value >= 1024 and units:
        value, unit = value / 1024, units.pop(0)
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
