"""The ties between a process and those whose end shall be its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.launchkit import alive, wait_until

_CHILD = """
import ctypes, os, signal, sys
from kvlaunch.launch.tether import tether
tether(int(sys.argv[1]))
on_parent_death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(on_parent_death))  # PR_GET_PDEATHSIG
print("tied", os.getpid(), on_parent_death.value, flush=True)
while True:
    signal.pause()
"""

_PARENT = """
import subprocess, sys, threading, time
def start():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline(), end="", flush=True)  # it is tied before this thread ends
if sys.argv[3] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    print("thread ended", flush=True)
else:
    start()
time.sleep(600)
"""


class Family:
    """A launcher, a parent and a child that ties itself to both."""

    def __init__(self, how: str) -> None:
        self.launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, _CHILD, str(self.launcher.pid), how], stdout=subprocess.PIPE, text=True
        )
        assert self.parent.stdout is not None
        said = [self.parent.stdout.readline() for _ in range(2 if how == "thread" else 1)]
        _, child, signum = next(line.split() for line in said if line.startswith("tied"))
        self.child, self.on_parent_death = int(child), int(signum)

    def close(self) -> None:
        for process in (self.parent, self.launcher):
            process.kill()
            process.wait()
        assert self.parent.stdout is not None
        self.parent.stdout.close()
        wait_until(lambda: not alive(self.child), 5, "the child ends with the rest")


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    family = Family(request.param)
    yield family
    family.close()


@pytest.mark.parametrize("family", ["main"], indirect=True)
def test_it_ends_with_its_parent(family: Family) -> None:
    assert family.on_parent_death == signal.SIGKILL
    family.parent.kill()
    wait_until(lambda: not alive(family.child), 2, "the child ends with its parent")
    assert family.launcher.poll() is None


@pytest.mark.parametrize("family", ["main", "thread"], indirect=True)
def test_it_ends_with_the_launcher(family: Family) -> None:
    family.launcher.kill()
    wait_until(lambda: not alive(family.child), 2, "the child ends with the launcher")
    assert family.parent.poll() is None


@pytest.mark.parametrize("family", ["thread"], indirect=True)
def test_the_end_of_the_thread_that_started_it_does_not_end_it(family: Family) -> None:
    assert family.on_parent_death == 0
    assert alive(family.child)
