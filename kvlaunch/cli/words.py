"""Words of the command line: which verb they mean, and how things are said back."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TextIO

from kvlaunch.config.overrides import looks_like_override

ROOT_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")


def route(args: list[str], verbs: Sequence[str]) -> list[str]:
    """`args` with the verb `up` in front where it is left out: the first word is an override, or an option of `up`."""
    if not args or args[0] in verbs or args[0].partition("=")[0] in ROOT_OPTIONS:
        return args
    first = args[0]
    if looks_like_override(first) or first.startswith("-"):
        return ["up", *args]
    return args


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
    lines = [f"{label} {message}", *(f"  {line}" for line in (hint or "").splitlines())]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
