"""A part of a page of the documentation that is written by a program, between two markers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def replaced(text: str, begin: str, end: str, part: str) -> str:
    """The text with `part` between its markers."""
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        sys.exit(f"the markers of the table are missing: {begin}")
    return f"{head}{begin}\n\n{part}\n\n{end}{tail}"


def renew(page: Path, rendered: Callable[[str], str], *, check: bool, source: str) -> int:
    """Write the page anew where it is not as `rendered` makes it.

    Args:
        check: write nothing; say so where the page differs.
        source: what the part is made from, for that sentence.

    Returns:
        The exit code: 1 where the page differs and `check` is set.
    """
    now = page.read_text(encoding="utf-8")
    wanted = rendered(now)
    if now == wanted:
        return 0
    if check:
        print(f"docs/{page.name} does not match {source}: run `make docs`", file=sys.stderr)
        return 1
    page.write_text(wanted, encoding="utf-8")
    return 0
