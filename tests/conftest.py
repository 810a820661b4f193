"""For every test: a runtime folder of the session's own, and nothing left behind at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlaunch import env as contract
from tests.leaks import (
    SESSION_MARK,
    ShmWatch,
    child_pids,
    left_behind,
    netns_names,
    new_children,
    our_processes,
    wait_until_gone,
)

STRAGGLERS_S = 10.0
CHILDREN_S = 2.0
ORDER = ("unit", "integration", "engines")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: tests see neither the user's runs nor a run that pytest was started in."""
    for name in vars(contract).values():
        if isinstance(name, str) and name.startswith("KVLAUNCH_"):
            os.environ.pop(name, None)
    os.environ[SESSION_MARK] = uuid.uuid4().hex
    # Under /tmp whatever TMPDIR says: sockets need a short path.
    runtime_dir = tempfile.mkdtemp(prefix="kvl-", dir="/tmp")
    os.environ["XDG_RUNTIME_DIR"] = runtime_dir
    config.add_cleanup(lambda: shutil.rmtree(runtime_dir, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick ones first."""
    root = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session where a process, socket, shared-memory segment or network namespace of its tests is left."""
    mark, runtime_dir, before = os.environ[SESSION_MARK], Path(os.environ["XDG_RUNTIME_DIR"]), netns_names()
    began_ns = time.time_ns()
    watch = ShmWatch()
    watch.start()
    yield
    watch.stop()
    left = wait_until_gone(lambda: left_behind(mark, runtime_dir, watch.seen, before, began_ns), STRAGGLERS_S)
    for process in our_processes(mark):
        process.kill()
    assert not left, "left behind by the tests:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def no_child_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a unit test that leaves a child process behind."""
    if "unit" not in request.path.relative_to(Path(__file__).parent).parts:
        yield
        return
    before = child_pids()
    yield
    left = wait_until_gone(lambda: new_children(before), CHILDREN_S)
    assert not left, "left behind by this test:\n" + "\n".join(left)
