"""Engines under measurement: started by kvlaunch as a user does, or bare, and what is asked of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlaunch.events import read_events
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.types import LaunchPlan

READY_TIMEOUT_S = 400
STOP_TIMEOUT_S = 60
KVLAUNCH = (sys.executable, "-m", "kvlaunch.cli.main")


@contextlib.contextmanager
def private_runs() -> Iterator[None]:
    """Runs of the benchmark have a folder of their own, apart from the user's."""
    folder = tempfile.mkdtemp(prefix="kvl-bench-", dir="/tmp")  # a socket's path must be short
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


class Client:
    """One connection at a time to an OpenAI server."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self._at = (host, port)
        self._model = model

    def complete(self, texts: Sequence[str], max_tokens: int) -> int:
        """Greedy completions of exactly `max_tokens` of all texts, in one request.

        Returns:
            The number of new tokens, as the server counts them.
        """
        body = {
            "model": self._model,
            "prompt": list(texts),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(*self._at, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise SystemExit(f"the engine answered {reply.status}: {content[:300]!r}")
        return int(json.loads(content)["usage"]["completion_tokens"])


@dataclass
class Engine:
    """A run of kvlaunch that is ready."""

    process: subprocess.Popen[str]
    paths: RunPaths
    plan: LaunchPlan

    def client(self) -> Client:
        return Client(self.plan.server.host, self.plan.server.port, self.plan.model.name)

    def kv_stats(self) -> dict[str, Any]:
        """The scheduler's KVStats as of the last time that it was idle."""
        return dict(json.loads(self.paths.kv_stats.read_bytes()))

    def kv_events(self) -> dict[int, dict[str, Any]]:
        """By global rank: its process, and where its KV region lies (elastic only)."""
        events, _ = read_events(self.paths.events)
        found = [(e.rank, e.pid, json.loads(e.detail) if e.detail else {}) for e in events if e.phase == "kv"]
        return {rank: {"pid": pid, **about} for rank, pid, about in found if rank is not None}

    def rank_pids(self) -> list[int]:
        """Process of each rank, by global rank."""
        events, _ = read_events(self.paths.events)
        pids = {e.rank: e.pid for e in events if e.phase == "weights" and e.rank is not None}
        return [pids[rank] for rank in sorted(pids)]


def at_once(engine_name: str, requests: int) -> str:
    """The engine's own option for how many requests it works on at once."""
    option = "max_running_requests" if engine_name == "sglang" else "max_num_seqs"
    return f"engine.args.{option}={requests}"


@contextlib.contextmanager
def engine(*overrides: str) -> Iterator[Engine]:
    """`kvlaunch up OVERRIDES` of the tiny model until it is ready; ended on leaving."""
    command = [*KVLAUNCH, "up", "model=tiny-qwen3", "server.port=0", "--json", *overrides]
    # Its progress goes to a file of no name: nobody reads a pipe while the engine serves.
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield _when_ready(process, errors)
        finally:
            end(process)


def _when_ready(process: subprocess.Popen[str], errors: Any) -> Engine:
    assert process.stdout is not None
    watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    if not line:
        errors.seek(0)
        raise SystemExit(f"kvlaunch was not ready: {errors.read()[-2000:]}")
    paths = RunPaths.of(json.loads(line)["run"])
    return Engine(process, paths, LaunchPlan.load(paths.plan))


def end(process: subprocess.Popen[Any]) -> None:
    """SIGINT, and SIGKILL where that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def prompts(count: int, seed: int) -> list[str]:
    """Texts of 60 to 300 bytes that share nothing at their beginning, so that no prefix is found in a cache."""
    base = "The pages of a cache are mapped on every rank of every stage, or on none of them. " * 4
    return [f"{seed}.{i} " + base[: 60 + 37 * ((i * 7 + seed) % 7)] for i in range(count)]


@dataclass(frozen=True)
class Round:
    """One round of load."""

    seconds: float
    tokens: int
    others_cpu: float
    """Share of the processors that processes not of this benchmark used meanwhile, 0 to 1."""
    cpu_s: float
    """Processor time that the engine's processes used for it."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def lengths(count: int, seed: int, mean: int) -> list[int]:
    """How many tokens each of so many requests gets: from half of the mean to one and a half, the same for a seed."""
    rng = random.Random(seed)
    return [rng.randint(mean // 2, mean + mean // 2) for _ in range(count)]


def load_round(target: Engine, texts: Sequence[str], max_tokens: Sequence[int]) -> Round:
    """All texts completed, each a request of its own and of its own length, all asked at once.

    Requests of one length end together, and their successors start together: how the engine happened to spread the
    first ones over the batches of its pipeline would then last for the whole round, and make it quick or slow.
    """
    client = target.client()
    others, cpu_before = OthersCpu(), cpu_seconds(target.process.pid)
    with ThreadPoolExecutor(len(texts)) as pool:
        started = time.perf_counter()
        tokens = sum(pool.map(lambda text, limit: client.complete([text], limit), texts, max_tokens))
        seconds = time.perf_counter() - started
    return Round(seconds, tokens, others.share(), cpu_seconds(target.process.pid) - cpu_before)


def first_token_latencies(target: Engine, texts: Sequence[str], *, max_tokens: int) -> list[float]:
    """Seconds of one-token completions that are asked one after another while all texts are being completed."""
    found: list[float] = []
    client = target.client()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(target.client().complete, texts, max_tokens)
        while not load.done():
            asked = time.perf_counter()
            client.complete([f"probe {len(found)} {texts[0]}"], 1)
            found.append(time.perf_counter() - asked)
        load.result()
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and its descendants have used so far."""
    import psutil

    total = 0.0
    family = psutil.Process(pid)
    for process in (family, *family.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class OthersCpu:
    """How much of the processors is used by processes that are none of ours, from now on."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._ours, self._all = self._used()

    def share(self) -> float:
        """0 to 1. The kernel counts in ticks of 10 ms: measure over seconds."""
        ours, everything = self._used()
        seconds = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        return max(0.0, (everything - self._all) - (ours - self._ours)) / seconds

    @staticmethod
    def _used() -> tuple[float, float]:
        import psutil

        ours = cpu_seconds(os.getpid())
        total = psutil.cpu_times()
        return ours, total.user + total.nice + total.system + total.irq + total.softirq + total.steal


def settled_stats(target: Engine, timeout_s: float = 20.0) -> dict[str, Any]:
    """KVStats of an engine that has become idle: they are written when it does, and a load has just ended."""
    time.sleep(1.0)  # the scheduler counts as idle after half a second
    deadline = time.monotonic() + timeout_s
    while not target.paths.kv_stats.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"no {target.paths.kv_stats} after a load")
        time.sleep(0.1)
    return target.kv_stats()


def quiet(limit: float = 0.25, *, timeout_s: float) -> float:
    """Wait until others use less than `limit` of the processors, or the time is over.

    Returns:
        What they used last, 0 to 1: goes into the results.
    """
    import psutil

    deadline = time.monotonic() + timeout_s
    while True:
        used = float(psutil.cpu_percent(interval=1.0)) / 100
        if used < limit or time.monotonic() > deadline:
            return round(used, 2)


def save(results: Path, name: str, content: dict[str, Any]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
