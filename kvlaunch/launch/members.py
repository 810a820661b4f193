"""Which processes belong to a run, and how the run's left-overs are removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvlaunch import env
from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.procfs import Identity, Process, descendants, environ_has, kill_all, scan
from kvlaunch.launch.shm import Segment, segments_of, unlink_segments

KILL_WITHIN_S = 2.0


def run_members(run_dir: Path, known: Iterable[Identity], *, roots: Iterable[int] = ()) -> list[Process]:
    """Every process of a run but this one, live or zombie.

    Four ways lead to a member, since each can fail: an ancestor may have ended, a session may have been left, and a
    process may have overwritten its environment. The run's folder tells them, and not its id, which its other nodes
    share.

    Args:
        known: processes of the run as recorded earlier. Those that live count, and so do all processes of a session
            of which such a one is still part: as long as it lives, the session's number means the same session.
        roots: processes whose descendants belong to the run; they themselves do not count.
    """
    table = scan()
    me = os.getpid()
    live = {pid for pid, start in known if pid in table and table[pid].start_time == start}
    sessions = {table[pid].session for pid in live} - {table[me].session if me in table else 0}
    found = live | {p.pid for p in table.values() if p.session in sessions}
    found |= {pid for pid in table if pid not in found and pid != me and environ_has(pid, env.RUN_DIR, str(run_dir))}
    found |= descendants(found, table) | descendants(roots, table)
    return [table[pid] for pid in sorted(found - {me, *roots})]


def end_everything(
    run_dir: Path, known: Sequence[Identity], shm: Iterable[Segment] = (), *, roots: Iterable[int] = ()
) -> list[Process]:
    """SIGKILL every process of a run and unlink the shared memory that they leave. See run_members.

    Returns:
        Processes that are still alive after KILL_WITHIN_S.
    """
    segments = set(shm)
    members = dict.fromkeys(known)

    def find() -> Iterator[Process]:
        for process in run_members(run_dir, list(members), roots=roots):
            if process.identity not in seen:
                seen.add(process.identity)
                segments.update(segments_of([process.pid]))
            members[process.identity] = None
            yield process

    seen: set[Identity] = set()
    left = kill_all(find, within_s=KILL_WITHIN_S)
    unlink_segments(segments)
    return left


def remove_sockets(paths: RunPaths) -> None:
    """Remove the sockets of a run, and what says where they are; its records and logs stay."""
    for path in paths.root.iterdir():
        if path.is_socket() or path == paths.listeners or path.name.startswith("kv-"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def remove_traces(paths: RunPaths) -> None:
    """The same, and the run's secret: it has ended."""
    remove_sockets(paths)
    paths.secret.unlink(missing_ok=True)
