"""What goes wrong at the start of a real engine."""

from __future__ import annotations

import pytest

from kvlaunch.errors import EngineError
from tests.engines.harness import ENGINES, kvlaunch, small
from tests.leaks import SHM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.supports("the rank that failed first is named")
@pytest.mark.parametrize("name", ENGINES)
def test_a_rank_that_raises_at_start_is_the_one_that_is_named(name: str) -> None:
    before = set(SHM.iterdir())
    out = kvlaunch(
        "up", "model=tiny-qwen3", "server.port=0", *small(name), "tp=2", "pp=2",
        timeout=400, KVLAUNCH_TEST_FAULT="raise,rank=1,at=weights",
    )  # fmt: skip
    assert out.returncode == EngineError.exit_code
    assert "rank 1" in out.stderr
    assert "injected fault at weights" in out.stderr
    assert "rank1.log" in out.stderr
    # A rank's semaphores may live too shortly to be seen in use by anybody.
    assert set(SHM.iterdir()) <= before
