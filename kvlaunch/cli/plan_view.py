"""`kvlaunch plan`: a LaunchPlan for people, or as JSON for programs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvlaunch.config.units import format_bytes
from kvlaunch.plan.types import LaunchPlan, NodePlan, RankPlan

if TYPE_CHECKING:
    from rich.console import Console

_FOLD_ABOVE = 32
"""Ranks: above it, equal ranks of one stage and node share a row."""
_NODES_IN_FULL = 4
_PIPED_WIDTH = 200
"""Columns where output is no terminal and COLUMNS is not set: nothing is cut."""

_COLUMNS = ("rank", "stage", "tp rank", "node", "device", "layers", "weights", "KV/token", "KV/block")


def print_json(plan: LaunchPlan) -> None:
    """Write the plan as the JSON that `up` stores and executes."""
    sys.stdout.write(plan.to_json().decode() + "\n")


def show(plan: LaunchPlan) -> None:
    """Print the plan for a person, as wide as the terminal allows."""
    from rich.console import Console

    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=_PIPED_WIDTH if piped else None)
    _facts(console, _headline(plan))
    _ranks(console, plan)
    _heading(console, "KV cache")
    _facts(console, _kv_facts(plan))
    _heading(console, "Endpoints")
    _facts(console, _endpoints(plan))
    _nodes(console, plan)
    _notes(console, plan)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")


def _facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    from rich.text import Text

    pairs = list(facts)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        console.print(Text.assemble((f"  {name:<{width}}  ", "cyan"), value))


def _headline(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    model = plan.model
    source = "" if model.path == model.name else f" from {model.path}"
    made = ", made locally on first use" if model.make_tiny else ""
    heads = f"{model.num_kv_heads} KV heads of {model.head_dim}"
    yield (
        "model",
        f"{model.name}{source} ({model.architecture}, {model.num_layers} layers, {heads}, {model.dtype}{made})",
    )
    nodes = "1 node" if plan.nnodes == 1 else f"{plan.nnodes} nodes"
    yield "engine", f"{plan.engine} on {plan.device}, started by {shlex.quote(plan.engine_python)}"
    yield "ranks", f"tp {plan.tp_size} x pp {plan.pp_size} = {plan.world_size} on {nodes}"
    port = plan.server.port
    host = f"[{plan.server.host}]" if ":" in plan.server.host else plan.server.host
    yield "server", f"http://{host}:{port}/v1" if port else f"http://{host}/v1, on any free port"


def _ranks(console: Console, plan: LaunchPlan) -> None:
    rows = list(_rows(plan))
    needed = sum(max(len(row[i]) for row in [_COLUMNS, *rows]) + 2 for i in range(len(_COLUMNS)))
    _heading(console, "Ranks (bytes are for one rank)")
    if needed > console.width:
        for row in rows:
            cells = zip(_COLUMNS[1:], row[1:], strict=True)
            console.print(f"  rank {row[0]}: {', '.join(f'{name} {value}' for name, value in cells)}")
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "device" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    from rich.padding import Padding

    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _rows(plan: LaunchPlan) -> Iterator[tuple[str, ...]]:
    """One row a rank, or one for neighbours that differ in nothing but their number."""
    group: list[RankPlan] = []
    for rank in plan.ranks:
        if group and (plan.world_size <= _FOLD_ABOVE or not _alike(group[-1], rank)):
            yield _row(group)
            group = []
        group.append(rank)
    yield _row(group)


def _alike(a: RankPlan, b: RankPlan) -> bool:
    def shared(r: RankPlan) -> tuple[object, ...]:
        device = r.device.partition(":")[0]
        return (r.pp_rank, r.node_rank, device, r.layers, r.weight_bytes, r.kv_bytes_per_token, r.kv_bytes_per_block)

    return shared(a) == shared(b)


def _row(ranks: Sequence[RankPlan]) -> tuple[str, ...]:
    first, last = ranks[0], ranks[-1]
    device, _, index = first.device.partition(":")
    devices = f"{device}:{_span(int(index), int(last.device.partition(':')[2]))}" if index else device
    return (
        _span(first.global_rank, last.global_rank),
        str(first.pp_rank),
        _span(first.tp_rank, last.tp_rank),
        str(first.node_rank),
        devices,
        _span(*first.layers),
        format_bytes(first.weight_bytes),
        format_bytes(first.kv_bytes_per_token),
        format_bytes(first.kv_bytes_per_block),
    )


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _kv_facts(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    kv = plan.kv
    tokens = kv.num_blocks * kv.block_size
    yield "mode", kv.mode
    yield "block", f"{kv.block_size} tokens"
    yield "blocks", f"{kv.num_blocks} ({tokens} tokens)"
    reserve = format_bytes(kv.reserve_bytes)
    if kv.mode == "static":
        yield "memory", f"{reserve} on the largest rank, all of it committed at start"
        return
    yield "reserve", f"{reserve} of address space on the largest rank"
    largest = max(rank.kv_bytes_per_block for rank in plan.ranks)
    page = format_bytes(largest * kv.blocks_per_page)
    blocks = f"{kv.blocks_per_page} block{'' if kv.blocks_per_page == 1 else 's'}"
    yield "page", f"{blocks}, {page} on the largest rank, mapped in multiples of {format_bytes(kv.granularity)}"
    yield "guard", "on: a touch of unmapped memory crashes" if kv.guard else "off"
    yield "ahead", f"{kv.ahead_low} to {kv.ahead_high} free pages stay mapped while busy"
    yield "cache", f"{format_bytes(kv.cache_keep_bytes)} kept when idle, the rest goes back after {kv.cache_idle_s:g} s"
    yield "commit", f"on all ranks within {kv.commit_timeout_s:g} s"


def _endpoints(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    yield "rendezvous", f"{plan.rdzv.backend} at {plan.rdzv.endpoint}, within {plan.rdzv.timeout_s:g} s"
    if plan.kv.mode == "static":
        return
    for stage in plan.stages:
        yield f"stage {stage.pp_rank}", f"{stage.endpoint} (rank {stage.leader} on node {stage.node_rank})"


def _nodes(console: Console, plan: LaunchPlan) -> None:
    many = len(plan.nodes) > _NODES_IN_FULL
    for node in plan.nodes[:1] if many else plan.nodes:
        _heading(console, f"Command of node {node.node_rank} (ranks {_span(node.ranks[0], node.ranks[-1])})")
        for line in _command_lines(node.argv):
            console.print(line)
        _environment(console, node, plan.nodes[0].env if node is not plan.nodes[0] else None)
    if many:
        console.print(f"\n{len(plan.nodes) - 1} more nodes: kvlaunch plan --json shows them all.")


def _command_lines(argv: Sequence[str]) -> list[str]:
    """`argv` quoted for a shell, an option and its value on a line."""
    lines: list[str] = []
    for word in argv:
        if not lines or (word.startswith("-") and len(word) > 2):
            lines.append(f"  {'  ' if lines else ''}{shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _environment(console: Console, node: NodePlan, known: Mapping[str, str] | None) -> None:
    """The variables that are set and taken away; on later nodes only those that differ from the first one's."""
    shown = {k: v for k, v in sorted(node.env.items()) if known is None or known.get(k) != v}
    if not shown and not node.unset:
        return
    console.print("  with the environment" if known is None else "  with an environment that differs in", style="cyan")
    for name, value in shown.items():
        console.print(f"    {name}={shlex.quote(value)}")
    if known is None and node.unset:
        console.print(f"    without {' '.join(node.unset)}")


def _notes(console: Console, plan: LaunchPlan) -> None:
    from rich.text import Text

    if not plan.notes:
        return
    _heading(console, "Chosen for you")
    for note in plan.notes:
        console.print(Text.assemble("  ", (f"{note.setting}: {note.value}", "cyan"), f"  {note.why}"))
