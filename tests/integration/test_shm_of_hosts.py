"""Shared memory of hosts that share their processes' ids, as containers may, and have /dev/shm to themselves."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.hosts import Host, hosts

USE = """
import sys, mmap
with open(sys.argv[1], "w+b") as file:
    file.truncate(mmap.PAGESIZE)
    mapped = mmap.mmap(file.fileno(), 0)
    print(flush=True)
    sys.stdin.read()
"""
REMOVE = """
import json, os, sys
from kvlaunch.launch.shm import Segment, unlink_segments
name = sys.argv[1]
segment = Segment(name, os.stat("/dev/shm/" + name).st_ino)
print(json.dumps([segment.inode, [removed.name for removed in unlink_segments([segment])]]))
"""


def removed(host: Host, name: str) -> tuple[int, list[str]]:
    """Inode of a segment there, and what was removed when its removal was asked for."""
    done = host.run(sys.executable, "-c", REMOVE, name)
    assert done.returncode == 0, done.stderr
    inode, names = json.loads(done.stdout)
    return int(inode), names


def user_of(host: Host, name: str) -> subprocess.Popen[str]:
    """A process there that makes a segment and has it mapped until its input ends."""
    command = host.command(sys.executable, "-c", USE, f"/dev/shm/{name}")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def test_a_segment_that_only_another_hosts_process_seems_to_use_is_removed() -> None:
    with hosts(2) as (first, second):
        with user_of(second, "theirs"):
            with user_of(first, "ours"):
                ours, names = removed(first, "ours")
                assert names == []
            assert removed(first, "ours") == (ours, ["ours"])
            theirs, names = removed(second, "theirs")
            assert theirs == ours, "the inodes must be the same, or this shows nothing"
            assert names == []
        assert removed(second, "theirs") == (theirs, ["theirs"])
