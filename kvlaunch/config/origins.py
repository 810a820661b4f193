"""Where each value of a composed config came from. Worked out only when asked: `kvlaunch config` shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvlaunch.config.groups import Groups
from kvlaunch.config.overrides import Request

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """One config that was merged."""

    config_path: str
    """As Hydra names it: `model/Qwen3-8B`."""
    package: str
    """Dotted key that it was merged at; "" for the root."""


@dataclass(slots=True)
class Origins:
    """Dotted key -> where its value came from."""

    loaded: Callable[[], list[Loaded]]
    """What was merged, first to last."""
    request: Request
    groups: Groups
    _table: dict[str, str] | None = field(default=None, init=False, repr=False)

    def of(self, key: str) -> str:
        """`tp=2` (the override as typed), a file, or `default`."""
        table = self._table
        if table is None:
            table = self._table = self._build()
        while key:
            if key in table:
                return table[key]
            key = key.rpartition(".")[0]
        return DEFAULT

    def of_choice(self, group: str) -> str:
        """Where the choice of a group came from: the override as typed, or `default` (a preset's counts as one)."""
        override = self.request.choices.get(group)
        return override.text if override else DEFAULT

    def _build(self) -> dict[str, str]:
        table: dict[str, str] = {}
        for item in self.loaded():
            path = self.groups.file(item.config_path)
            if path is None:
                continue
            own = self.groups.own is not None and path.is_relative_to(self.groups.own)
            label = str(path) if own else f"{item.config_path}.yaml"
            for key in _leaves(_read(path), item.package):
                table[key] = label
        if self.request.given_model is not None or self.request.served_as is not None:
            text = self.request.choices["model"].text
            table["model.name"] = text
            if self.request.given_model is not None:
                table["model.path"] = text
        for key, _, override in self.request.values:
            for below in [k for k in table if k.startswith(f"{key}.")]:
                del table[below]
            table[key] = override.text
        return table


def _read(path: Any) -> dict[str, Any]:
    import yaml

    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {k: v for k, v in content.items() if k != "defaults"} if isinstance(content, dict) else {}


def _leaves(content: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in content.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path
