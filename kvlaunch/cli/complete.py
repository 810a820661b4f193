"""What the shell offers after TAB: keys, choices and values of overrides. No Hydra, no OmegaConf: it must be quick."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from kvlaunch.config.groups import Groups
from kvlaunch.config.keys import GROUPS, PRESET, Key, children, doc_of, find
from kvlaunch.errors import ConfigError

Item = tuple[str, str]
"""What may be typed, and what it means."""

_VARIABLE = "_KVLAUNCH_COMPLETE"


def overrides(incomplete: str, before: list[str], config_dir: Path | None) -> list[Item]:
    """Completions of one override.

    Args:
        incomplete: what has been typed of it.
        before: the overrides that stand before it. bash takes `=` for the end of a word: the last one then ends in
            `=`, and only the value is asked for.
        config_dir: as given on the command line.
    """
    groups = _groups(config_dir)
    if before and before[-1].endswith("=") and "=" not in incomplete:
        return _matching(_values(_plain_key(before[-1][:-1]), incomplete, groups), incomplete)
    key, equals, typed = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", text) for value, text in _matching(_values(_plain_key(key), typed, groups), typed)]
    mark = incomplete[: len(incomplete) - len(_plain_key(incomplete))]
    return [(f"{mark}{word}", text) for word, text in _keys(_plain_key(incomplete), groups)]


def join_split_words(environ: MutableMapping[str, str] | None = None) -> None:
    """Undo bash's splitting at `=` in the words that it hands over for completion.

    `engine = v` (three words) becomes `engine=` and `v`: the word under the cursor has to stay one of its own, because
    bash replaces just that. Other shells do not split there.
    """
    env = os.environ if environ is None else environ
    if env.get(_VARIABLE) != "complete_bash" or "COMP_WORDS" not in env:
        return
    parts, cursor = env["COMP_WORDS"].split("\n"), int(env.get("COMP_CWORD", "0"))
    done: list[str] = []
    glue = False
    for word in parts[:cursor]:
        if glue or (word.startswith("=") and len(done) > 1):
            done[-1] += word
        else:
            done.append(word)
        glue = word.strip("=") == "" and word != ""
    current = parts[cursor] if cursor < len(parts) else ""
    if current.startswith("=") and len(done) > 1:
        done[-1] += current
        current = ""
    env["COMP_WORDS"] = "\n".join([*done, current])
    env["COMP_CWORD"] = str(len(done))


def _groups(config_dir: Path | None) -> Groups:
    try:
        return Groups.at(config_dir)
    except ConfigError:
        return Groups.at(None)


def _plain_key(word: str) -> str:
    return word.lstrip("+~-")


def _matching(items: Iterator[Item], typed: str) -> list[Item]:
    return [(value, text) for value, text in items if value.startswith(typed)]


def _values(path: str, typed: str, groups: Groups) -> Iterator[Item]:
    if path in (*GROUPS, PRESET):
        for choice in groups.choices(path).values():
            yield choice.name, "of your own" if choice.own else _first_comment(choice.path)
        if path == "model" and typed.startswith(("/", ".", "~")):
            yield from _folders(typed)
        return
    key = find(path)
    if key is None:
        return
    if key.kind == "enum":
        yield from ((choice, "") for choice in key.choices)
    elif key.kind == "bool":
        yield from (("true", ""), ("false", ""))


def _first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as f:
        line = f.readline()
    return _brief(line[1:].strip()) if line.startswith("#") else ""


def _brief(text: str) -> str:
    """The first clause of `text`, on one line: zsh and fish show it beside the word."""
    clause = re.split(r"[.;:](?:\s|$)|,\s", text.replace("`", ""), maxsplit=1)[0]
    return clause if len(clause) <= 70 else f"{clause[:69].rstrip()}…"


def _folders(typed: str) -> Iterator[Item]:
    head, slash, tail = typed.rpartition("/")
    base = Path(f"{head}{slash}").expanduser() if slash else Path()
    try:
        found = sorted(p.name for p in base.iterdir() if p.is_dir() and p.name.startswith(tail))
    except OSError:
        return
    yield from ((f"{head}{slash}{name}/", "") for name in found)


def _keys(typed: str, groups: Groups) -> list[Item]:
    """Keys one level deep; a single one is opened further, so that TAB never stops at a dead end."""
    parent = typed.rpartition(".")[0]
    found = [item for key in children(parent) for item in _forms(key)] if not parent or find(parent) else []
    if not parent and groups.choices(PRESET):
        found.append((f"{PRESET}=", "values of your own that go together"))
    matching = [item for item in found if item[0].startswith(typed)]
    if len(matching) != 1:
        return matching
    (word, text), path = matching[0], matching[0][0].rstrip(".=")
    if word.endswith("."):
        return [item for key in children(path) for item in _forms(key)] or matching
    values = [(f"{word}{value}", meaning) for value, meaning in _values(path, "", groups)]
    key = find(path)
    if values or key is None:
        return values or matching
    # Two of them, so that the shell does not close the word with a space behind the `=`.
    return [*matching, (f"{word}{_example(key)}", text)]


def _example(key: Key) -> str:
    if key.default in (None, "", "???"):
        return {"int": "N", "float": "SECONDS", "bytes": "2GiB"}.get(key.kind, key.leaf.upper())
    return str(key.default)


def _forms(key: Key) -> Iterator[Item]:
    text = _brief(doc_of(key))
    if key.path in GROUPS:
        yield f"{key.path}=", text
    if key.kind in ("node", "args", "env"):
        yield f"{key.path}.", text
    else:
        yield f"{key.path}=", text
