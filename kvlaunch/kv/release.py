"""When a freed page may be unmapped: only after every step that was scheduled before the free has finished."""

from __future__ import annotations


class StepClock:
    """Counts the engine's steps: how many were scheduled, how many of them have finished on every rank.

    Several steps are in flight at once with pipeline parallelism or asynchronous scheduling, and those that were
    scheduled before a request was aborted still write into its blocks. A page whose last block was freed when
    `scheduled == e` may be unmapped as soon as `finished >= e`.

    One counter is enough because steps finish in the order in which they were scheduled: vLLM's
    `EngineCore.step_with_batch_queue` puts each new step at the left end of its queue, takes the oldest from the
    right, and waits for that one. The output of a step depends on every layer of every rank, so when it is there no
    rank still touches the step's blocks.

    A freed block that a new request takes over while older steps are in flight is the engine's own affair: its steps
    run in order on the ranks. Only unmapping needs this clock.
    """

    __slots__ = ("finished", "scheduled")

    def __init__(self) -> None:
        self.scheduled = 0
        """Steps scheduled so far."""
        self.finished = 0
        """Steps of these that have finished."""

    def step_scheduled(self) -> int:
        """Count one more step. Returns its number, from 1 on.

        Call it before the scheduler decides what the step does: what it frees while deciding then waits for that
        step too, which is never wrong.
        """
        self.scheduled += 1
        return self.scheduled

    def step_finished(self) -> None:
        """The oldest step in flight has finished.

        Raises:
            ValueError: no step is in flight.
        """
        if self.finished == self.scheduled:
            raise ValueError(f"a step was reported as finished, but all {self.scheduled} scheduled steps had finished")
        self.finished += 1
