"""Starts kvlaunch as a user does, and asks the engine that comes up."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvlaunch.events import read_events
from kvlaunch.kv.memory.smaps import resident_bytes
from kvlaunch.launch.paths import RunPaths, runs_root
from kvlaunch.plan.types import LaunchPlan

ENGINES = [
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("sglang", marks=pytest.mark.sglang),
]
"""For tests that hold for both engines; each runs in its own environment."""

ALIKE = pytest.mark.skipif("KVLAUNCH_ALL" not in os.environ, reason="like another row: KVLAUNCH_ALL=1 make test")
"""For rows that take long and differ little from one that always runs."""

READY_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


def prompts(count: int) -> list[str]:
    """Texts of different lengths; some share a prefix, so that the prefix cache has something to find."""
    base = "The pages of a cache are mapped on every rank of every stage, or on none of them. " * 3
    return [base[: 40 + 17 * (i % 8)] + f" Case {i}: " + "x" * (i * 5 % 60) for i in range(count)]


PROMPTS = prompts(24)


def small(engine: str) -> tuple[str, ...]:
    return (f"engine={engine}", "kv.reserve=64MiB", "kv.cache.idle_s=2")


SMALL = small("vllm")


def prefix_cache(engine: str, on: bool) -> str:
    """The engine's own option that switches its prefix cache."""
    if engine == "sglang":
        return f"engine.args.disable_radix_cache={str(not on).lower()}"
    return f"engine.args.enable_prefix_caching={str(on).lower()}"


def overrides_of(engine: str, tp: int, pp: int, prefix_caching: bool) -> list[str]:
    return [*small(engine), f"tp={tp}", f"pp={pp}", prefix_cache(engine, prefix_caching)]


@functools.cache
def stock_answers(engine: str, tp: int, pp: int, prefix_caching: bool) -> list[list[list[int]]]:
    """What the stock engine (kv=static) answers to PROMPTS, asked all at once, twice. Started once a test session."""
    with launch(*overrides_of(engine, tp, pp, prefix_caching), "kv=static") as static:
        return [static.complete_all(PROMPTS) for _ in range(2)]


@dataclass
class Engine:
    """A running kvlaunch and the engine that it started."""

    process: subprocess.Popen[str]
    run: str
    url: str
    stderr: list[str] = field(default_factory=list)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(runs_root() / self.run)

    @property
    def plan(self) -> LaunchPlan:
        return LaunchPlan.load(self.paths.plan)

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            data = reply.read()
        return json.loads(data) if data[:1] in (b"{", b"[") else data.decode()

    def complete(self, prompt: str, max_tokens: int = 24, timeout: float = 120) -> list[int]:
        """Greedy continuation, as token ids."""
        if self.plan.engine == "sglang":
            return self._generate([prompt], max_tokens, timeout)[0]
        reply = self.post(
            "/v1/completions",
            {
                "model": self.plan.model.name,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout,
        )
        tokens = reply["choices"][0]["token_ids"]
        assert len(tokens) == max_tokens
        return [int(t) for t in tokens]

    def complete_all(self, texts: Sequence[str], max_tokens: int = 24) -> list[list[int]]:
        """All at once, in the order of `texts`."""
        if self.plan.engine == "sglang":
            return self._generate(texts, max_tokens, 300)
        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(lambda text: self.complete(text, max_tokens), texts))

    def _generate(self, texts: Sequence[str], max_tokens: int, timeout: float) -> list[list[int]]:
        """SGLang: one request for all, as token ids, which reaches the scheduler in one piece. So batches form alike
        each time, and sums come out alike; with requests of their own, stock SGLang's tokens vary.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        ids = [list(text.encode()) for text in texts]
        replies = self.post("/generate", {"input_ids": ids, "sampling_params": sampling}, timeout)
        return [[int(t) for t in reply["output_ids"]] for reply in replies]

    def flush(self) -> None:
        """SGLang: forget the prefix cache and every slot. Refused while it has work; an end of work takes a moment."""

        def flushed() -> bool:
            try:
                self.post("/flush_cache", {})
            except urllib.error.HTTPError as error:
                if error.code != 400:
                    raise
                return False
            return True

        wait_until(flushed, 30, "flushed")

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels, from /metrics."""
        at = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def ps(self) -> dict[str, Any]:
        out = kvlaunch("ps", "--json", XDG_RUNTIME_DIR=str(self.paths.root.parent.parent))
        assert out.returncode == 0, out.stderr
        return next(entry for entry in json.loads(out.stdout) if entry["run"] == self.run)

    def mapped_bytes(self) -> list[int]:
        """What each rank says it has mapped."""
        return [rank["kv"]["mapped_bytes"] for rank in self.ps()["ranks"]]

    def kv_events(self) -> dict[int, dict[str, Any]]:
        """By global rank: where its region lies, and which listener speaks for it, as the rank itself told."""
        events, _ = read_events(self.paths.events)
        found = [(e.rank, e.pid, json.loads(e.detail)) for e in events if e.phase == "kv"]
        return {rank: {"pid": pid, **about} for rank, pid, about in found if rank is not None}

    def resident_bytes(self) -> list[int]:
        """What the kernel says each rank has resident in its region (/proc/<pid>/smaps)."""
        about = self.kv_events()
        return [
            resident_bytes(about[rank]["pid"], about[rank]["address"], about[rank]["nbytes"]) for rank in sorted(about)
        ]

    def page_bytes(self) -> list[int]:
        """Bytes of one page in each rank."""
        return self.plan.page_bytes

    def kv_stats(self) -> dict[str, Any]:
        """KVStats that the engine wrote when it last became idle."""
        return dict(json.loads(self.paths.kv_stats.read_bytes()))

    def at_baseline(self) -> bool:
        """At most one page beyond the null block's is resident on each rank."""
        return all(got <= 2 * page for got, page in zip(self.resident_bytes(), self.page_bytes(), strict=True))

    def stop(self, sig: signal.Signals = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(STOP_TIMEOUT_S)


class Load:
    """The same requests, round after round, in a thread of its own, until the block is left."""

    def __init__(self, engine: Engine, texts: Sequence[str], max_tokens: int) -> None:
        self.rounds: list[list[int]] = []
        """Number of tokens of each request, for each round that was answered."""
        self.peak: list[int] = []
        """The most that was resident on each rank while one of the waiting methods waited."""
        self._engine = engine
        self._texts = texts
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._errors:
            raise self._errors[0]

    def another_round(self) -> None:
        """Wait until one that began later than now has been answered."""
        wanted, self.peak = len(self.rounds) + 2, self._engine.resident_bytes()
        self._watch_until(lambda: len(self.rounds) >= wanted, "the load goes on")

    def until_resident(self, least: Sequence[float]) -> None:
        """Wait until each rank has had so many bytes resident: however seldom this busy machine lets us look."""
        self.peak = self._engine.resident_bytes()
        self._watch_until(lambda: all(map(operator.gt, self.peak, least)), f"resident more than {least}")

    def _watch_until(self, condition: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            self.peak = [*map(max, self.peak, self._engine.resident_bytes())]
            return condition() or bool(self._errors)

        try:
            wait_until(look, 180, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; the most that was seen: {self.peak}") from None

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                answers = self._engine.complete_all(self._texts, max_tokens=self._max_tokens)
                self.rounds.append([len(tokens) for tokens in answers])
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            self._errors.append(error)


def tokens_of(index: int) -> int:
    return 8 + index % 32


def one_request(engine: Engine, index: int, give_up_after: int | None) -> bool:
    """A streamed completion, given up after so many tokens by closing the connection. True: it was finished."""
    at = urllib.parse.urlsplit(engine.url)
    body = {
        "model": engine.plan.model.name,
        "prompt": prompts(8)[index % 8] + str(index % 50),
        "max_tokens": tokens_of(index),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if give_up_after == 0:
            return False
        reply = connection.getresponse()
        assert reply.status == 200
        tokens = 0
        while line := reply.readline():
            tokens += line.startswith(b"data: {")
            if give_up_after is not None and tokens >= give_up_after:
                return False
        return True
    finally:
        connection.close()


def storm(engine: Engine, requests: int, at_once: int = 48) -> None:
    """So many streamed requests, half of them given up by their clients at random."""
    rng = random.Random(7)
    limits = [rng.randrange(tokens_of(i)) if rng.random() < 0.5 else None for i in range(requests)]
    with ThreadPoolExecutor(at_once) as pool:
        finished = list(pool.map(lambda i: one_request(engine, i, limits[i]), range(requests)))
    assert finished == [limit is None for limit in limits]


def kvlaunch(*args: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvlaunch.cli.main", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **env},
        check=False,
    )


@contextlib.contextmanager
def launch(*overrides: str, fault: str = "", cwd: Path | None = None) -> Iterator[Engine]:
    """`kvlaunch up OVERRIDES --json` until ready; ended on leaving, whatever happened."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlaunch.cli.main", "up", "model=tiny-qwen3", "server.port=0", "--json", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "KVLAUNCH_TEST_FAULT": fault},
    )
    lines: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    errors = process.stderr
    reader = threading.Thread(target=lambda: lines.extend(errors), daemon=True)
    reader.start()
    watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            process.wait(STOP_TIMEOUT_S)
            reader.join(5)
            raise AssertionError(f"kvlaunch ended with {process.returncode} before it was ready:\n" + "".join(lines))
        ready = json.loads(line)
        yield Engine(process, ready["run"], ready["url"], lines)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        reader.join(5)
        process.stdout.close()
        process.stderr.close()
