"""What the first rank of SGLang tells all ranks: cached tokens that are to go, and a limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlaunch.engines.sglang.orders import Limit, LimitBox, Trim, Trimmer


class Cache:
    def __init__(self, keep: int = 0, idle_s: float = 10.0) -> None:
        self.now = 100.0
        self.tokens = 0
        self.trimmer = Trimmer(keep_tokens=keep, idle_s=idle_s, evictable=lambda: self.tokens, clock=lambda: self.now)

    def ended(self, *lengths: int) -> None:
        requests: list[Any] = [
            SimpleNamespace(origin_input_ids=[0] * (n // 2), output_ids=[0] * (n - n // 2)) for n in lengths
        ]
        self.trimmer.requests_ended(requests)
        self.tokens += sum(lengths)

    def after(self, seconds: float) -> Trim | None:
        self.now += seconds
        trim = self.trimmer.due()
        if trim is not None:
            self.tokens -= trim.tokens
        return trim


def test_tokens_go_when_they_have_idled_long_enough_oldest_first() -> None:
    cache = Cache()
    assert cache.after(0) is None
    cache.ended(60, 40)
    assert cache.after(5) is None
    cache.ended(30)
    assert cache.after(4.9) is None
    assert cache.after(1.1) == Trim(100)
    assert cache.tokens == 30
    assert cache.after(5) == Trim(30)
    assert cache.after(100) is None


def test_what_is_to_be_kept_stays() -> None:
    cache = Cache(keep=50)
    cache.ended(80)
    assert cache.after(11) == Trim(30)
    assert cache.after(1000) is None


def test_tokens_that_are_used_again_stay() -> None:
    cache = Cache()
    cache.ended(100)
    for _ in range(10):
        cache.now += 5
        cache.trimmer.requests_ended([SimpleNamespace(origin_input_ids=[0] * 90, output_ids=[0] * 10)])
        assert cache.after(0) is None
    assert cache.after(11) == Trim(100)


def test_the_tree_is_asked_once_in_a_while() -> None:
    asked = []
    now = [0.0]
    trimmer = Trimmer(keep_tokens=0, idle_s=5.0, evictable=lambda: asked.append(1) or 7, clock=lambda: now[0])
    for _ in range(1000):
        now[0] += 0.001
        trimmer.due()
    assert len(asked) == 2


def test_tokens_that_stand_in_the_way_of_the_limit_go_at_once_and_no_more_than_there_are() -> None:
    cache, over = Cache(keep=1000, idle_s=1.0), [0]
    cache.trimmer = Trimmer(
        keep_tokens=1000,
        idle_s=1.0,
        evictable=lambda: cache.tokens,
        over_limit=lambda: over[0],
        clock=lambda: cache.now,
    )
    cache.ended(100)
    assert cache.after(0.2) is None
    over[0] = 32
    assert cache.after(0.2) == Trim(32)
    over[0] = 500
    assert cache.after(0.2) == Trim(68)
    assert cache.after(0.2) is None


def test_the_latest_limit_is_the_one_that_is_passed_on_and_once() -> None:
    box = LimitBox()
    assert box.due() is None
    box.put(7)
    box.put(None)
    assert box.due() == Limit(None)
    assert box.due() is None
    with pytest.raises(ValueError, match="limit of 0 pages"):
        box.put(0)
    assert box.due() is None
