"""`kvlaunch config`: the composed config as YAML with its origins, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlaunch.cli.words import coloured
from kvlaunch.config.compose import Composed
from kvlaunch.config.groups import Groups
from kvlaunch.config.keys import GROUPS, PRESET, all_keys
from kvlaunch.config.units import exact_bytes

_COMMENT_AT = 48
"""Column of the comments, where the value leaves room."""


def show(composed: Composed, *, json_output: bool) -> None:
    """Print the config. JSON: the config itself, and under `origins` where each dotted key came from."""
    if json_output:
        origins = {key: composed.origin(key) for key, _ in _leaves(composed.container, "")}
        _print_json({**composed.container, "origins": origins})
        return
    dim = coloured(sys.stdout)
    for line, origin in _yaml_lines(composed, composed.container, "", 0):
        comment = f"# {' '.join(origin.split())}" if origin else ""
        if dim and comment:
            comment = f"\x1b[2m{comment}\x1b[0m"
        sys.stdout.write(f"{line:<{_COMMENT_AT}}  {comment}\n" if comment else f"{line}\n")


def show_groups(config_dir: Path | None, *, json_output: bool) -> None:
    """Print groups and choices. JSON: `{group: [choice, ...]}`."""
    groups = Groups.at(config_dir)
    found, defaults = groups.all_choices(), groups.defaults()
    if json_output:
        _print_json({group: list(choices) for group, choices in found.items()})
        return
    for group, choices in found.items():
        sys.stdout.write(f"{group}=\n")
        for choice in choices.values():
            default = "  (default)" if choice.name == defaults.get(group) else ""
            sys.stdout.write(f"  {choice.name}{default}{f'  ({choice.path})' if choice.own else ''}\n")
        if group == "model":
            sys.stdout.write("  or a hub id (Org/Name), or a local folder (/data/m, ./m, ~/m)\n")
        if group == PRESET and not choices:
            sys.stdout.write("  none: DIR/preset/NAME.yaml makes one, with --config-dir DIR\n")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _leaves(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, below in value.items():
        if isinstance(below, dict) and below:
            yield from _leaves(below, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", below


def _yaml_lines(composed: Composed, value: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    """Lines of YAML and where each came from; every value on one line, so that the comment can stand behind it."""
    keys = all_keys()
    for name, below in value.items():
        path, indent = f"{prefix}{name}", "  " * depth
        if isinstance(below, dict) and below:
            yield f"{indent}{_scalar(name)}:", composed.origins.of_choice(path) if path in GROUPS else ""
            yield from _yaml_lines(composed, below, f"{path}.", depth + 1)
            continue
        size = path in keys and keys[path].kind == "bytes" and below is not None
        yield f"{indent}{_scalar(name)}: {_scalar(exact_bytes(below) if size else below)}", composed.origin(path)


def _scalar(value: Any) -> str:
    """`value` as YAML on one line, strings quoted where they would read as something else."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")
