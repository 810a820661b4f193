"""The first exception of each process of a run, so that the one that came first is the one that is reported.

Files in `<run folder>/failures/`, one a process, written by the code plugged into the engine.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What ended one process."""

    t: float
    """Seconds since the Unix epoch."""
    who: str
    """`rank3`, `scheduler`, `api`."""
    rank: int | None
    """Global rank, or None for a process that is no rank."""
    pid: int
    exception: str
    """`RuntimeError: what it said`."""
    log: str
    """File with the whole story."""


def record_failure(run_dir: Path, who: str, rank: int | None, exc: BaseException, log: Path) -> bool:
    """Write down that `who` failed. Only the first record of each `who` is kept; False for a later one.

    Raises:
        OSError: the folder cannot be written to.
    """
    text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    failure = Failure(t=time.time(), who=who, rank=rank, pid=os.getpid(), exception=text[:4000], log=str(log))
    folder = run_dir / "failures"
    folder.mkdir(mode=0o700, exist_ok=True)
    # The name appears with its whole content, or not at all: write aside, then link.
    draft = folder / f".{who}.{os.getpid()}"
    draft.write_bytes(msgspec.json.encode(failure))
    try:
        os.link(draft, folder / f"{who}.json")
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
    return True


def read_failures(run_dir: Path) -> list[Failure]:
    """Every record of the current epoch, the earliest first."""
    records = [
        msgspec.json.decode(path.read_bytes(), type=Failure) for path in sorted((run_dir / "failures").glob("*.json"))
    ]
    return sorted(records, key=lambda f: f.t)


def first_failure(run_dir: Path) -> Failure | None:
    """The earliest record, or None where nobody wrote one."""
    records = read_failures(run_dir)
    return records[0] if records else None


def archive_failures(run_dir: Path, epoch: int) -> None:
    """Put the records of an epoch that is over aside, before the engine starts again."""
    folder = run_dir / "failures"
    if folder.is_dir():
        folder.rename(run_dir / f"failures-epoch{epoch}")
    folder.mkdir(mode=0o700)
