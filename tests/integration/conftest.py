"""Fixtures of the tests that talk to a stage's listener."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.stage_kit import Raw, Stage, open_files, wait_for


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path may have 107 bytes. Nothing but what the test put there may be left."""
    path = Path(tempfile.mkdtemp(prefix="kvl", dir="/tmp"))
    threads, files = threading.active_count(), open_files()
    yield path
    wait_for(lambda: threading.active_count() == threads)
    wait_for(lambda: open_files() == files)
    assert not list(path.iterdir())
    shutil.rmtree(path)


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    with Stage(folder) as stage:
        yield stage


@pytest.fixture
def raw(stage: Stage) -> Iterator[Raw]:
    with Raw(stage.endpoint) as raw:
        yield raw
