"""The leak check itself: it must see what is left, and only what is ours."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import (
    SESSION_MARK,
    SHM,
    ShmWatch,
    child_pids,
    left_behind,
    netns_names,
    new_children,
    our_processes,
    shm_used_by,
    wait_until_gone,
)

ORPHAN = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def orphan() -> Iterator[tuple[int, str]]:
    """Pid and mark of a process that is no descendant of pytest any more; it ends when its standard input does."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, SESSION_MARK: mark},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.wait()  # until then it is a descendant
        try:
            yield pid, mark
        finally:
            os.kill(pid, signal.SIGKILL)


def test_orphan_is_found_by_its_mark(orphan: tuple[int, str]) -> None:
    pid, mark = orphan
    assert pid not in child_pids()
    assert [process.pid for process in our_processes(mark) if process.pid == pid] == [pid]


def test_process_of_another_session_is_not_ours(orphan: tuple[int, str]) -> None:
    pid, _ = orphan
    assert pid not in {process.pid for process in our_processes(uuid.uuid4().hex)}


def test_child_is_found_until_it_ends() -> None:
    before = child_pids()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert [f"process {child.pid}" in line for line in new_children(before)] == [True]
        child.communicate(b"\n")
    assert wait_until_gone(lambda: new_children(before), 5) == []


def test_segment_is_found_while_mapped_and_while_left() -> None:
    name = f"kvl-test-{uuid.uuid4().hex}"
    segment = SHM / name
    segment.write_bytes(bytes(mmap.PAGESIZE))
    try:
        assert name not in shm_used_by([os.getpid()])
        with segment.open("r+b") as handle, mmap.mmap(handle.fileno(), mmap.PAGESIZE):
            watch = ShmWatch()
            watch.look()
        assert name in watch.seen
        assert f"shared memory {segment}" in left_behind("", Path("/nonexistent"), watch.seen, netns_names())
    finally:
        segment.unlink()
    assert f"shared memory {segment}" not in left_behind("", Path("/nonexistent"), watch.seen, netns_names())


def test_segment_that_nobody_was_seen_to_use_is_found_where_nobody_uses_it() -> None:
    segment = SHM / f"kvl-test-{uuid.uuid4().hex}"
    began_ns = segment.parent.stat().st_mtime_ns
    segment.write_bytes(bytes(mmap.PAGESIZE))
    try:
        line = f"shared memory {segment}"
        assert line in left_behind("", Path("/nonexistent"), set(), netns_names(), began_ns)
        assert line not in left_behind("", Path("/nonexistent"), set(), netns_names(), time.time_ns())
        with segment.open("rb"):
            assert line not in left_behind("", Path("/nonexistent"), set(), netns_names(), began_ns)
    finally:
        segment.unlink()


def test_named_semaphore_is_found() -> None:
    before = shm_used_by([os.getpid()])
    lock = multiprocessing.get_context("spawn").Lock()
    (name,) = shm_used_by([os.getpid()]) - before
    assert name.startswith("sem.")
    del lock


def test_socket_is_found(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        # Relative to the folder: tmp_path may be too long for a socket's path.
        folder = os.open(tmp_path / "run", os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{folder}/kv-s0")
        finally:
            os.close(folder)
    assert f"socket {tmp_path}/run/kv-s0" in left_behind("", tmp_path, set(), netns_names())


def test_waiting_ends_with_what_is_left() -> None:
    assert wait_until_gone(lambda: ["still here"], 0.1) == ["still here"]
