"""Words of the command line: which verb they mean, and how things are said back."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from kvlaunch.config.overrides import looks_like_override
from kvlaunch.errors import ConfigError

OPTIONS = ("--detach", "--verbose", "--json", "--config-dir", "--groups", "--help")
"""Options of the verbs that take overrides."""

ROOT_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")


def route(args: list[str], verbs: Sequence[str]) -> list[str]:
    """`args` with the verb `up` in front where it is left out.

    It is where the first word is an override or an option of `up`; a word that is nothing at all goes there too, unless
    it looks like a verb spelled wrong, because the overrides know best what may have been meant.
    """
    if not args or args[0] in verbs or args[0].partition("=")[0] in ROOT_OPTIONS:
        return args
    first = args[0]
    if looks_like_override(first) or first.startswith("-") or not difflib.get_close_matches(first, verbs):
        return ["up", *args]
    return args


def check(overrides: Sequence[str], verbs: Sequence[str]) -> None:
    """Refuse words among the overrides that were meant for the command line itself.

    Raises:
        ConfigError: an option spelled wrong, a verb that does not come first, or neither verb nor override.
    """
    for word in overrides:
        if word in verbs:
            raise ConfigError(f"{word!r} is a verb, and a verb comes first.", hint=f"Write: kvlaunch {word} ...")
        if word.startswith("-") and "=" not in word:
            close = difflib.get_close_matches(word, OPTIONS, n=1, cutoff=0.75)
            if close:
                raise ConfigError(f"There is no option {word!r}.", hint=f"Did you mean {close[0]}?")


def quoted(word: str) -> str:
    """`word` as a shell wants it."""
    return shlex.quote(word)


def coloured(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream` (https://no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def complain(message: str, hint: str | None = None) -> None:
    """Print `error: message` and its hint to standard error."""
    label = "\x1b[1;31merror:\x1b[0m" if coloured(sys.stderr) else "error:"
    lines = [f"{label} {message}"]
    for line in (hint or "").splitlines():
        lines += [f"  {part}" for part in _wrapped(line)]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _wrapped(line: str) -> list[str]:
    """`line` in the width of the terminal; as it is where nobody looks, so that programs find it whole."""
    if not sys.stderr.isatty():
        return [line]
    width = max(40, shutil.get_terminal_size().columns - 2)
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
