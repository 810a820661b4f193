"""Events of a run: one JSON object a line in `events.jsonl`, appended by every process of the run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec

Phase = Literal["spawned", "rendezvous", "engine", "weights", "kv", "ready", "stopping", "stopped", "failed"]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    t: float
    """Seconds since the Unix epoch."""
    phase: Phase
    pid: int
    rank: int | None = None
    """Global rank, or None for the run as a whole."""
    detail: str = ""


def emit(path: Path, phase: Phase, *, rank: int | None = None, detail: str = "") -> None:
    """Append one event. A single write of under 4 KiB with O_APPEND: lines of several processes do not mix."""
    line = msgspec.json.encode(Event(t=time.time(), phase=phase, pid=os.getpid(), rank=rank, detail=detail[:2000]))
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line + b"\n")
    finally:
        os.close(fd)


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Events from byte `offset` on, and the offset to continue from. A missing file has no events."""
    try:
        with path.open("rb") as f:
            f.seek(offset)
            data = f.read()
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    return [msgspec.json.decode(line, type=Event) for line in data[:end].splitlines()], offset + end
