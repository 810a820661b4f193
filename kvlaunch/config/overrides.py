"""Overrides as they are typed, `KEY=VALUE`, sorted into choices of groups and values of keys.

Hydra composes the groups. Values do not pass through Hydra's override grammar, which reads `=`, `#`, `{` and `,` as
its own signs and would have them quoted twice; they are set afterwards, in the order typed, on the typed config.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlaunch.config import values
from kvlaunch.config.groups import Choice, Groups
from kvlaunch.config.keys import GROUPS, PRESET, Key, children, find, nearest, suggest
from kvlaunch.errors import ConfigError

_KEY = re.compile(r"[A-Za-z_$][\w$.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Override:
    """One override."""

    text: str
    """As it was typed."""
    key: str
    raw: str | None
    """What follows the first `=`; None for a deletion."""

    @property
    def deletes(self) -> bool:
        return self.raw is None


@dataclass(slots=True)
class Request:
    """What all overrides together ask for."""

    choices: dict[str, Override] = field(default_factory=dict)
    """Group -> the override that chose from it."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Group -> choice. Without `model` where the model is none of the choices."""
    given_model: dict[str, str] | None = None
    """Name and path of a model that is none of the choices."""
    served_as: str | None = None
    """The hub id that was asked for, where its numbers come from a choice."""
    values: list[tuple[str, Any, Override]] = field(default_factory=list)
    """Dotted key, value, and where it came from, in the order typed."""
    deletions: list[Override] = field(default_factory=list)


def looks_like_override(word: str) -> bool:
    """Whether a first word stands for `up` and its overrides: it holds a `=`, or starts with `+` or `~`."""
    return "=" in word or word[:1] in ("+", "~")


def parse(text: str, groups: Groups) -> Override:
    """Split one override into key and value.

    `--tp=2`, `+tp=2` and `++tp=2` mean the same as `tp=2`: the schema says which keys there are.

    Raises:
        ConfigError: it is no override; the message says what was probably meant.
    """
    body = text
    if not text.isprintable() and any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise ConfigError(f"{text!r} is not UTF-8.", hint="Names and paths in overrides must be UTF-8 text.")
    if body.startswith("--") and "=" in body and not body.startswith("---"):
        name, _, rest = body[2:].partition("=")
        body = f"{name.replace('-', '_')}={rest}"
    elif body.startswith("+"):
        body = body.removeprefix("+").removeprefix("+")
    if body.startswith("~"):
        key = body[1:].partition("=")[0].strip()
        return Override(text, _checked(key, text), None)
    if "=" not in body:
        raise _no_override(text, groups)
    key, _, raw = body.partition("=")
    return Override(text, _checked(key.strip(), text), raw)


def sort(texts: Sequence[str], groups: Groups) -> Request:
    """Parse and check every override. The last one wins where a key is given twice.

    Raises:
        ConfigError: an unknown key, a wrong type, an unknown choice; the message names what was probably meant.
    """
    for before, text, after in zip(["", *texts], texts, [*texts[1:], ""], strict=False):
        if text == "=":
            raise ConfigError(f"'{before} = {after}': an override has no spaces.", hint=f"Write {before}={after}")
    request = Request()
    for text in texts:
        override = parse(text, groups)
        if override.key in (*GROUPS, PRESET) and not _is_mapping(override):
            _add_choice(request, override, groups)
        elif override.deletes:
            _add_deletion(request, override)
        else:
            _add_value(request, override)
    return request


def _checked(key: str, text: str) -> str:
    if not key:
        raise ConfigError(f"{text!r}: a key is missing before the '='.", hint="Write KEY=VALUE, for example tp=2")
    if not _KEY.fullmatch(key) or ".." in key or key.endswith("."):
        raise ConfigError(f"{text!r}: {key!r} is no key.", hint="Keys are names joined by dots, for example kv.reserve")
    return _same_spelling(key)


def _same_spelling(key: str) -> str:
    """`engine.args.max-model-len` is the option that `engine.args.max_model_len` is."""
    prefix = "engine.args."
    return prefix + key.removeprefix(prefix).replace("-", "_") if key.startswith(prefix) else key


def _no_override(text: str, groups: Groups) -> ConfigError:
    if text.startswith("-"):
        return _no_option(text)
    if find(text) is not None or text in GROUPS:
        return ConfigError(f"{text!r} has no value.", hint=f"Write {text}=VALUE, without spaces.")
    for group, choices in groups.all_choices().items():
        if text in choices:
            return ConfigError(f"{text!r} is not an override.", hint=f"Did you mean {group}={text}?")
    if "/" in text or text.startswith((".", "~")):
        return ConfigError(f"{text!r} is not an override.", hint=f"To serve that model: model={shlex.quote(text)}")
    meant = suggest(text)
    hint = f"Did you mean {meant}=VALUE?" if meant else "Overrides are written KEY=VALUE, for example tp=2"
    return ConfigError(f"{text!r} is neither a verb nor an override.", hint=hint)


def _no_option(text: str) -> ConfigError:
    name = text.lstrip("-").replace("-", "_")
    key = name if find(name) else suggest(name)
    if text == "--":
        hint = "Leave it out: options and overrides may be mixed."
    elif name in ("m", "multirun"):
        return ConfigError(
            f"{text}: {values.NO_SWEEP}.",
            hint="Run the command once for each combination.",
        )
    elif key:
        hint = f"Settings are written without dashes and with '=': {key}=VALUE"
    elif name and len(name) > 1:
        hint = f"An option of the engine itself is written engine.args.{name}=VALUE (true for a bare flag)."
    else:
        hint = "See kvlaunch --help."
    return ConfigError(f"There is no option {text!r}.", hint=hint)


def _is_mapping(override: Override) -> bool:
    return override.raw is not None and override.raw.lstrip("'\"").startswith("{")


def _add_choice(request: Request, override: Override, groups: Groups) -> None:
    group = override.key
    if override.raw is None:
        if group == PRESET:
            return
        raise ConfigError(
            f"{override.text}: a launch needs one choice of the group {group}.", hint=f"Write {group}=CHOICE"
        )
    text, _ = values.unquote(override.raw)
    choices = groups.choices(group)
    request.choices[group] = override
    if group == "model":
        request.given_model = request.served_as = None
    if group == "model" and text not in choices:
        _add_model(request, text, choices, groups)
        return
    if text not in choices:
        raise unknown_choice(group, text, choices)
    request.chosen[group] = text


def unknown_choice(group: str, text: str, choices: dict[str, Choice]) -> ConfigError:
    """The error for a choice that the group does not have."""
    names = list(choices)
    if group == PRESET and not names:
        return ConfigError(
            f"preset={text}: there are no presets.",
            hint=f"A preset is a file DIR/preset/{text or 'NAME'}.yaml of your own; give DIR with --config-dir DIR.",
        )
    listed = ", ".join(names)
    if len(names) > 1 and ("," in text or values.SWEEP.fullmatch(text)):
        return ConfigError(
            f"{group}={text}: {values.NO_SWEEP}.",
            hint=f"Choose one of: {listed}.",
        )
    close = nearest(text, names)
    hint = f"Did you mean {group}={close}? " if close and text != "null" else ""
    return ConfigError(f"{group}={text}: there is no such {group}.", hint=f"{hint}Choices: {listed}.")


def _add_model(request: Request, text: str, choices: dict[str, Choice], groups: Groups) -> None:
    """A hub id or a local folder in place of a choice."""
    if not text or text == "null":
        raise no_model(choices)
    local = text.startswith(("/", "./", "../", "~")) or text in (".", "..") or (Path(text).is_dir())
    if not local and (
        "," in text or values.SWEEP.fullmatch(text) or not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text)
    ):
        error = unknown_choice("model", text, choices)
        if "/" in text:
            error.hint = "A hub id looks like Qwen/Qwen3-8B; a local folder starts with / or ./ or ~/"
        else:
            error.hint = f"{error.hint} Or a hub id (Qwen/Qwen3-8B), or a local folder (/data/m, ./m)."
        raise error
    request.chosen.pop("model", None)
    if local:
        path = os.path.normpath(Path(text).expanduser().absolute())
        request.given_model = {"name": Path(path).name or path, "path": path}
        return
    known = groups.model_at(text)
    if known is None:
        request.given_model = {"name": text, "path": text}
    else:
        # The public numbers of a model that is known need no network; it is served under the name that was asked for.
        request.chosen["model"], request.served_as = known, text


def no_model(choices: dict[str, Choice]) -> ConfigError:
    """The error for a launch without a model."""
    return ConfigError(
        "No model is given.",
        hint="Give a hub id (model=Qwen/Qwen3-8B), a local folder (model=/data/m) or a choice: "
        f"{', '.join(c for c in choices)}. model=tiny-qwen3 needs no download.",
    )


def _add_deletion(request: Request, override: Override) -> None:
    key = find(override.key)
    if key is None:
        raise unknown_key(override)
    if key.path == override.key:
        raise ConfigError(
            f"{override.text}: {override.key} cannot be taken out, only changed.",
            hint=f"Write {override.key}=VALUE; only entries of engine.args and engine.env can be taken out.",
        )
    request.deletions.append(override)


def _add_value(request: Request, override: Override) -> None:
    key = find(override.key)
    if key is None:
        raise unknown_key(override)
    raw = override.raw or ""
    if key.kind == "node" or (key.kind in ("args", "env") and key.path == override.key):
        _add_mapping(request, key, override, values.mapping(override.key, raw))
        return
    request.values.append((override.key, values.coerce(key, override.key, raw), override))


def _add_mapping(request: Request, key: Key, override: Override, given: dict[str, Any]) -> None:
    """`server={port: 1}`: each entry is checked as if it had been typed alone."""
    for name, value in given.items():
        path = f"{key.path}.{name}"
        below = find(path)
        if below is None:
            raise unknown_key(Override(override.text, path, ""))
        if below.kind == "args":
            request.values.append((path, value, override))
        elif isinstance(value, dict):
            _add_mapping(request, below, override, value)
        else:
            request.values.append((path, values.coerce(below, path, values.plain_text(value)), override))


def unknown_key(override: Override) -> ConfigError:
    """The error for a key that the schema does not have."""
    path = override.key
    top = path.partition(".")[0]
    if top == "hydra":
        return ConfigError(
            f"{override.text}: Hydra's own settings have no effect here.",
            hint="kvlaunch uses Hydra to compose the config only; it makes no outputs/ folder.",
        )
    meant = suggest(path)
    value = "VALUE" if override.raw is None else override.raw
    if meant:
        return ConfigError(f"There is no key {path!r}.", hint=f"Did you mean {meant}={value}?".replace("=?", "?"))
    parent = path.rpartition(".")[0]
    siblings = children(parent) or children("")
    if "." not in path and path.isupper():
        hint = f"A variable for the engine is written engine.env.{path}={value}"
    elif "." not in path:
        option = path.replace("-", "_")
        hint = (
            f"An option of the engine itself is written engine.args.{option}={value}. "
            f"Keys: {', '.join(k.leaf for k in siblings)}."
        )
    else:
        hint = f"{parent if children(parent) else 'The config'} has: {', '.join(k.leaf for k in siblings)}."
    return ConfigError(f"There is no key {path!r}.", hint=hint)
