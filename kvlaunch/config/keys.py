"""Every key of the config and its type, read from the schema without Hydra or OmegaConf.

Overrides are checked, and completed in the shell, against this table.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvlaunch.config import schema

GROUPS = ("engine", "model", "kv", "device", "cluster")
"""Keys whose value is a choice: a file of the same name in a folder of that name."""

PRESET = "preset"
"""The group of the user's own presets; its files lie at the root of the config."""

Kind = Literal["int", "float", "bool", "str", "bytes", "enum", "node", "args", "env"]

WANTS: dict[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "bytes": "a size in bytes",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the config."""

    path: str
    """Dotted, from the root."""
    kind: Kind
    """`node`: has keys of its own; `args`: anything goes below it; `env`: names of variables go below it."""
    optional: bool
    choices: tuple[str, ...]
    """What an enum may be."""
    default: Any
    owner: str
    """Class in the schema that declares it."""

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def wants(self) -> str:
        """`a whole number`, for messages."""
        text = f"one of {', '.join(self.choices)}" if self.kind == "enum" else WANTS.get(self.kind, "keys of its own")
        return f"{text}, or null" if self.optional else text


def _unwrap(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """The members of a union without None, and whether None was one of them."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = tuple(m for m in members if m is not types.NoneType)
    return plain, len(plain) < len(members)


def _kind(members: tuple[Any, ...], path: str) -> Kind:
    if set(members) == {str, int}:
        return "bytes"
    (only,) = members
    if typing.get_origin(only) is dict:
        return "env" if typing.get_args(only)[1] is not Any else "args"
    if dataclasses.is_dataclass(only):
        return "node"
    if isinstance(only, type) and issubclass(only, Enum):
        return "enum"
    kinds: dict[Any, Kind] = {int: "int", float: "float", bool: "bool", str: "str"}
    if only not in kinds:
        raise TypeError(f"{path}: the schema uses a type that overrides cannot express: {only}")
    return kinds[only]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return None
    return field.default.value if isinstance(field.default, Enum) else field.default


def _walk(cls: type, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = f"{prefix}{field.name}"
        members, optional = _unwrap(hints[field.name])
        kind = _kind(members, path)
        choices = tuple(m.value for m in members[0]) if kind == "enum" else ()
        yield Key(path, kind, optional, choices, _default(field), cls.__name__)
        if kind == "node":
            yield from _walk(members[0], f"{path}.")


@cache
def all_keys() -> dict[str, Key]:
    """Dotted path -> key, in the order of the schema."""
    return {key.path: key for key in _walk(schema.LaunchConfig, "")}


def find(path: str) -> Key | None:
    """The key that governs `path`: itself, or the open dictionary (`engine.args`, `engine.env`) that it lies in."""
    keys = all_keys()
    if path in keys:
        return keys[path]
    for parent, key in keys.items():
        if key.kind in ("args", "env") and path.startswith(f"{parent}."):
            return key
    return None


def children(path: str) -> list[Key]:
    """The keys one level below `path`; "" for the root."""
    prefix = f"{path}." if path else ""
    return [k for k in all_keys().values() if k.path.startswith(prefix) and "." not in k.path[len(prefix) :]]


@cache
def key_docs() -> dict[str, str]:
    """`Class.field` -> the first sentence of its docstring in the schema."""
    docs: dict[str, str] = {}
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    for cls in (n for n in tree.body if isinstance(n, ast.ClassDef)):
        for field, doc in zip(cls.body, cls.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
            ):
                docs[f"{cls.name}.{field.target.id}"] = " ".join(str(doc.value.value).split())
    return docs


def doc_of(key: Key) -> str:
    """What the key means, or "" where the schema says nothing more than its name."""
    return key_docs().get(f"{key.owner}.{key.leaf}", "")


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate most like `word`, or None where nothing is like it. Ties go to the one that starts alike."""

    def score(candidate: str) -> float:
        a, b = word.casefold(), candidate.casefold()
        same_start = len(a) - len(a.removeprefix(b[:1]))
        return difflib.SequenceMatcher(None, a, b).ratio() + 0.05 * same_start

    best = max(candidates, key=score, default=None)
    return best if best is not None and score(best) >= cutoff else None


# What the engines, torchrun and other launchers call these settings.
SYNONYMS = {
    "tensor_parallel_size": "tp",
    "tensor_parallel": "tp",
    "tp_size": "tp",
    "tensor_model_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "pipeline_parallel": "pp",
    "pp_size": "pp",
    "model_path": "model",
    "model_name": "model.name",
    "served_model_name": "model.name",
    "num_nodes": "nnodes",
    "nodes": "nnodes",
    "rank": "node_rank",
    "dist_init_addr": "rdzv.endpoint",
    "master_addr": "rdzv.endpoint",
    "rdzv_endpoint": "rdzv.endpoint",
    "rdzv_backend": "rdzv.backend",
    "rdzv_id": "rdzv.id",
    "run_name": "name",
    "kv_cache_memory_bytes": "kv.reserve",
    "page_size": "kv.block_size",
    "python": "engine.python",
}


def suggest(path: str) -> str | None:
    """The key that was probably meant by `path`, which is none."""
    keys = all_keys()
    plain = path.replace("-", "_")
    if plain in keys:
        return plain
    if plain in SYNONYMS:
        return SYNONYMS[plain]
    parent, _, leaf = plain.rpartition(".")
    if parent and parent not in keys:
        parent = suggest(parent) or ""
    if parent and parent in keys:
        below = nearest(leaf, [k.leaf for k in children(parent)])
        if below:
            return f"{parent}.{below}"
    if not parent:
        top = nearest(leaf, [k.path for k in children("")], cutoff=0.7)
        if top:
            return top
    exact = [k.path for k in keys.values() if k.leaf == leaf]
    if exact:
        return exact[0]
    close = nearest(leaf, [k.leaf for k in keys.values()], cutoff=0.8)
    return next((k.path for k in keys.values() if k.leaf == close), None)
