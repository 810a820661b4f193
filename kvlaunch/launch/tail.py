"""The ends of log files."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def last_lines(path: Path, count: int = 20) -> str:
    """The last lines of a file without terminal escapes; empty where there is no such file."""
    try:
        with path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - 400 * count))
            data = f.read()
    except OSError:
        return ""
    return "\n".join(plain(data.decode(errors="replace")).splitlines()[-count:])


def plain(text: str) -> str:
    """The text without terminal escapes."""
    return _ESCAPES.sub("", text)


class Follower:
    """Reads what is appended to a file, line by line. The file may appear later, or be cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._partial = b""

    def lines(self, *, rest: bool = False) -> list[str]:
        """Whole lines added since the last call.

        Args:
            rest: take an unfinished last line too.
        """
        try:
            with self.path.open("rb") as f:
                if f.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._partial = 0, b""
                f.seek(self._offset)
                data = f.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        if rest and self._partial:
            whole.append(self._partial)
            self._partial = b""
        return [line.decode(errors="replace") for line in whole]
