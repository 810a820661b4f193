"""The thread that talks to the ranks on behalf of a KVCacheManager, and wakes its owner when something is due."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.channel import Channel
from kvlaunch.kv.geometry import merged_runs


@dataclass(frozen=True, slots=True)
class Operation:
    """One map or unmap over all ranks."""

    kind: Literal["map", "unmap"]
    pages: tuple[int, ...]
    urgent: bool = False
    """The owner waits for it: it goes before everything that is queued."""


@dataclass(frozen=True, slots=True)
class Result:
    operation: Operation
    error: KVCommitError | None
    """None: applied on every rank. Else on none, as far as the channel can tell."""


class Background:
    """Runs operations one after another over the channel; maps go before unmaps.

    Threads: one owner thread calls every public method; the thread made here calls the channel and `wake`. They meet
    in three places: the queues (under `_lock`), `results` (a deque: the background appends, the owner pops), and
    `deadline` (see `arm`). The background holds no lock while it is in the channel or in `wake`, and never waits for
    the owner, so neither can block the other.

    Args:
        channel: called from the background thread only, from `start` until `stop` has returned True.
        wake: called from the background thread when the deadline has come, an operation has failed, or the thread is
            about to die. It must neither block nor call back into the manager.
        clock: seconds, monotonic.
    """

    def __init__(self, channel: Channel, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        self._channel = channel
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._maps: deque[Operation] = deque()
        self._unmaps: deque[Operation] = deque()
        self._stopping = False
        self._wake_failed = False
        self._thread: threading.Thread | None = None
        self.results: deque[Result | Exception] = deque()
        """What the owner has to integrate, oldest first. An exception is the last entry: the thread has died of it."""
        self.deadline: float | None = None
        """When `wake` is to be called next; None: never. Reset to None as it is called."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._main, name="kvlaunch-kv", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> bool:
        """Queue an operation; its result appears in `results`. False: stopped, nothing was queued."""
        with self._lock:
            if self._stopping:
                return False
            queue = self._maps if operation.kind == "map" else self._unmaps
            if operation.urgent:
                queue.appendleft(operation)
            else:
                queue.append(operation)
            self._work.notify()
        return True

    def wait_result(self) -> None:
        """Block until `results` holds something.

        Raises:
            RuntimeError: the thread is not running, so nothing would come.
        """
        with self._lock:
            while not self.results:
                if self._thread is None or not self._thread.is_alive():
                    raise RuntimeError("the KV cache's background thread is not running")
                self._done.wait(1.0)

    def arm(self, deadline: float | None) -> None:
        """Have `wake` called at `deadline` in place of the earlier one; None: not at all."""
        with self._lock:
            self.deadline = deadline
            self._work.notify()

    def stop(self, timeout: float) -> bool:
        """End the thread once the operation that it is in has ended; what is queued is dropped.

        Returns:
            False where the thread still runs after `timeout` seconds.
        """
        with self._lock:
            self._stopping = True
            self._maps.clear()
            self._unmaps.clear()
            self._work.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # noqa: BLE001 - not swallowed: the owner raises it again at its next call
            self._finish(error)
            self._wake_owner()

    def _step(self) -> bool:
        """Do the next thing, waiting for it. False: stopped."""
        with self._lock:
            while not (self._stopping or self._maps or self._unmaps):
                timeout = None if self.deadline is None else self.deadline - self._clock()
                if timeout is not None and timeout <= 0:
                    self.deadline = None
                    break
                self._work.wait(timeout)
            if self._stopping:
                return False
            queue = self._maps or self._unmaps
            operation = queue.popleft() if queue else None
        if operation is None:
            self._wake_owner()
        else:
            self._run(operation)
        return True

    def _run(self, operation: Operation) -> None:
        call = self._channel.map if operation.kind == "map" else self._channel.unmap
        failure: KVCommitError | None = None
        try:
            call(merged_runs([(page, 1) for page in operation.pages]))
        except KVCommitError as error:
            failure = error
        self._finish(Result(operation, failure))
        if failure is not None:
            self._wake_owner()

    def _wake_owner(self) -> None:
        if not self._wake_failed:
            self._wake_failed = True  # until it has returned: what raised once is not called again to tell of it
            self._wake()
            self._wake_failed = False

    def _finish(self, result: Result | Exception) -> None:
        with self._lock:
            self.results.append(result)
            self._done.notify()
