"""Values as a person types them, turned into what their key wants.

Text stays as it was typed: no value has to be quoted twice for the sake of a grammar, and `1.10`, `None` or `true`
stay text where text is wanted. Quotes around a whole value (`'"a b"'`) are taken off, as Hydra does.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from kvlaunch.config.keys import Key, nearest
from kvlaunch.config.units import EXAMPLES as SIZES
from kvlaunch.config.units import parse_bytes
from kvlaunch.errors import ConfigError

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_INT = re.compile(r"-?(?:0|[1-9]\d*)")
_FLOAT = re.compile(r"-?\d+\.\d+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SWEEP = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|extend_list)\s*\(.*\)\s*", re.DOTALL)
"""Hydra's functions, which stand for many values."""

NO_SWEEP = "kvlaunch makes one launch a command, no sweeps"

EXAMPLES: dict[str, str] = {"tp": "2", "pp": "2", "nnodes": "2", "node_rank": "0", "kv.block_size": "16"}


def unquote(raw: str) -> tuple[str, bool]:
    """`raw` without a pair of quotes around all of it, and whether there was one."""
    if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"":
        quote, inner = raw[0], raw[1:-1]
        if not re.search(rf"(?<!\\){quote}", inner):
            return inner.replace(f"\\{quote}", quote), True
    return raw, False


def coerce(key: Key, path: str, raw: str) -> Any:
    """The value that `raw` means for the key `path`.

    Raises:
        ConfigError: it is not of the type that the key wants; the message names the type and an example.
    """
    text, quoted = unquote(raw)
    if text == "???":
        raise ConfigError(f"{path}=??? means a value that is missing.", hint=f"{path} wants {key.wants}.")
    if key.kind == "args":
        return text if quoted else anything(text)
    if key.kind == "env":
        return _variable(path, text, quoted)
    if text == "null" and not quoted:
        if key.optional:
            return None
        raise ConfigError(f"{path} cannot be null: it wants {key.wants}.", hint=_leave_out(key))
    return text if key.kind == "str" else _parsed(key, path, text)


def _parsed(key: Key, path: str, text: str) -> Any:
    if "," in text or SWEEP.fullmatch(text):
        raise ConfigError(f"{path}={text}: {NO_SWEEP}.", hint=f"{path} wants {key.wants}: {_example(key, path)}")
    if key.kind == "bytes":
        _check_bytes(path, key, text)
        return text
    if key.kind == "enum":
        return _choice(key, path, text)
    value = {"int": _int, "float": _float, "bool": _bool}[key.kind](text)
    if value is None:
        raise ConfigError(f"{path} wants {key.wants}, got {text!r}.", hint=f"For example: {_example(key, path)}")
    return value


def anything(text: str) -> Any:
    """What `text` means where any type is welcome (`engine.args`).

    true, false and null; a number where writing it again gives the same text (so `1.10` and `007` stay text); JSON, or
    a list or mapping of YAML; else the text itself.
    """
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if text == "null":
        return None
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and repr(float(text)) == text:
        return float(text)
    if text[:1] in ("{", "["):
        return _container(text)
    return text


def mapping(path: str, raw: str) -> dict[str, Any]:
    """The mapping in `raw`, `{port: 1}` or JSON, for a key that has keys of its own.

    Raises:
        ConfigError: it is not a mapping.
    """
    text, _ = unquote(raw)
    value = _container(text) if text.startswith("{") else text
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise ConfigError(
            f"{path} has keys of its own, so {raw!r} cannot be its value.",
            hint=f"Set one of them ({path}.KEY=VALUE), or give a mapping: '{path}={{key: value}}'.",
        )
    return value


def _container(text: str) -> Any:
    """JSON, else YAML with every bare word read as if it had been typed alone, else the text as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    import yaml

    try:
        return _as_typed(yaml.load(text, Loader=yaml.BaseLoader))
    except yaml.YAMLError:
        return text


def _as_typed(node: Any) -> Any:
    if isinstance(node, dict):
        # Hydra takes `{port:1}`, which is the one key "port:1" to YAML.
        pairs = [k.split(":", 1) if v == "" and ":" in str(k) else (k, v) for k, v in node.items()]
        return {k: _as_typed(v) for k, v in pairs}
    if isinstance(node, list):
        return [_as_typed(v) for v in node]
    return anything(node) if isinstance(node, str) else node


def _int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?\d+(_\d+)*", text, re.ASCII) else None


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _bool(text: str) -> bool | None:
    word = text.lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _check_bytes(path: str, key: Key, text: str) -> None:
    try:
        parse_bytes(text, what=path)
    except ConfigError as e:
        hint = f"Write {SIZES}{', or null' if key.optional else ''}."
        raise ConfigError(e.message, hint=hint) from None


def _choice(key: Key, path: str, text: str) -> str:
    if text in key.choices:
        return text
    close = nearest(text, key.choices)
    hint = f"Did you mean {path}={close}?" if close else f"For example: {path}={key.choices[0]}"
    raise ConfigError(f"{path} wants {key.wants}, got {text!r}.", hint=hint)


def _variable(path: str, text: str, quoted: bool) -> str | None:
    name = path.removeprefix("engine.env.")
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(
            f"{path}: {name!r} cannot be the name of an environment variable.",
            hint="Letters, digits and _ only, not starting with a digit: engine.env.NAME=VALUE",
        )
    return None if text == "null" and not quoted else text


def _leave_out(key: Key) -> str:
    return f"Leave it out to get the default, {key.default}." if key.default not in (None, "???") else "Give a value."


def _example(key: Key, path: str) -> str:
    if path in EXAMPLES or key.default in (None, "???"):
        return f"{path}={EXAMPLES.get(path, key.choices[0] if key.choices else 'VALUE')}"
    return f"{path}={plain_text(key.default)}"


def plain_text(value: Any) -> str:
    """A scalar as it would be typed after `KEY=`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
