"""Keeps the physical memory of an elastic KV cache in step with the live load, on every rank alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvlaunch.errors import KVCommitError
from kvlaunch.kv.channel import Channel
from kvlaunch.kv.commits import Commits
from kvlaunch.kv.pages import PagePool
from kvlaunch.kv.release import StepClock
from kvlaunch.kv.settings import KVSettings, check_limit
from kvlaunch.kv.stats import KVStats
from kvlaunch.kv.watermarks import Watermarks

logger = logging.getLogger(__name__)

RESERVE_SHARE = 8
"""The pages mapped ahead of need are at most one in so many of the address space, or ahead_high where that is more."""


class KVCacheManager:
    """Grows and shrinks the mapped part of a KV cache, page by page, on all ranks at once.

    One owner thread (the engine's scheduler) calls every method; block allocation is plain data in that thread, and a
    background thread talks to the ranks. Memory is mapped ahead of need while the engine is busy, so that `ensure`
    seldom waits, and goes back

    - while busy: what was free throughout the last idle_s, beyond the reserve, so that a load that goes up and
      down does not map and unmap in turn;
    - idle (no allocation and no step for idle_s): all free pages, or all but one where no other block is free;
    - at once, where more is mapped than the limit allows;

    never before the steps scheduled until then have finished (StepClock). A map that fails is a scheduling miss:
    `ensure` returns less than was asked for, and unmapped pages are not promised until a pause is over, which doubles
    with each failure in a row. It ends early when memory is given back or the limit raised. A failed map ahead of
    need only pauses mapping ahead. For failed unmaps see Commits.

    Any exception of the background thread other than KVCommitError is raised again in the owner thread, at its next
    call of a method that says so below ("background errors"), and at every one after that.

    Args:
        world_size: the number of ranks that this manager keeps in step: tp_size x pp_size under an engine with a
            single scheduler.
        settings: sizes, watermarks and times.
        channel: the way to the ranks. It is closed by `close`.
        wake: called from the background thread when the owner should call `tick` soon although the engine may be
            asleep. It must neither block nor call back into the manager.
        clock: seconds, monotonic.

    Raises:
        ValueError: settings that contradict each other.
    """

    def __init__(
        self,
        *,
        world_size: int,
        settings: KVSettings,
        channel: Channel,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= settings.ahead_low <= settings.ahead_high:
            raise ValueError(f"ahead_low={settings.ahead_low} must lie between 0 and ahead_high={settings.ahead_high}")
        self.world_size = world_size
        self.settings = settings
        self.steps = StepClock()
        self._channel = channel
        self._clock = clock
        self._pool = PagePool(settings.num_blocks, settings.blocks_per_page)
        self._commits = Commits(self._pool, channel, wake, clock, settings.backoff_s)
        self._background = self._commits.background
        self._ahead = Watermarks(settings.ahead_low, settings.ahead_high, self._pool.num_pages // RESERVE_SHARE)
        self._limit = self._checked_limit(settings.limit_pages)
        self._idle = True  # at baseline, or nothing to do before the next call
        self._last_active = clock()
        self._window_end = self._last_active + settings.idle_s
        self._had_reserve = False  # since the engine was idle: its first stall says nothing of the reserve's size
        self._least_empty = 0  # fewest empty pages seen in the window
        self._owner_deadline: float | None = None
        self._stalls = self._stalled_steps = 0
        self._stall_seconds = 0.0
        self._last_stalled_step = -1

    def start(self) -> None:
        """Check that every rank is there and agrees, then start the background thread.

        Page 0 must be mapped on every rank already.

        Raises:
            KVCommitError: a rank is missing, did not answer, or has another geometry or other pages mapped.
        """
        wanted = (self.settings.num_blocks, self.settings.blocks_per_page, 1)
        states = {state.global_rank: state for state in self._channel.state()}
        wrong = {
            rank: f"has num_blocks, blocks_per_page, mapped pages {got} and not {wanted}"
            for rank, state in sorted(states.items())
            if (got := (state.num_blocks, state.blocks_per_page, state.mapped_pages)) != wanted
        }
        if wrong or len(states) != self.world_size:
            reasons = "".join(f"; rank {rank} {reason}" for rank, reason in wrong.items())
            message = f"the KV cache needs {self.world_size} ranks in one state; {len(states)} reported{reasons}"
            raise KVCommitError(message, failures=wrong)
        self._background.start()

    def close(self) -> None:
        """Stop the background thread, drop what it has not begun, close the channel. `ensure` maps nothing any more.

        Waits for the operation in flight, at most twice its deadline.
        """
        self._commits.closed = True
        if self._background.stop(2 * self.settings.commit_timeout_s + 1):
            self._channel.close()
        else:  # closing it under the thread's feet would be worse than leaving it to the end of the process
            logger.error("KV cache: the operation in flight did not end; its channel stays open")

    @property
    def last_error(self) -> KVCommitError | None:
        """The latest failure of a map or unmap."""
        return self._commits.last_error

    @property
    def free_blocks(self) -> int:
        """Blocks that can be promised now: free in mapped pages, and in pages that may still be mapped or reclaimed.

        While starved (a map on demand failed, and the pause after it is not over), unmapped pages do not count.
        """
        pool, more = self._pool, self._allowance()
        if self._commits.demand.until is not None and self._commits.demand.blocked(self._clock()):
            more = min(more, pool.retiring_pages)
        return pool.free_blocks + more * pool.blocks_per_page

    @property
    def in_use_blocks(self) -> int:
        """Blocks handed out; the null block is not among them."""
        return self._pool.in_use_blocks

    def ensure(self, n: int) -> int:
        """Have at least n blocks ready for `take`, mapping pages where needed; that waits for the ranks (a stall).

        Returns:
            Blocks that `take` can hand out now. Less than n: the limit is reached, or the ranks could not map
            (`last_error`); the caller may evict cached blocks instead, or try later.

        Raises: background errors.
        """
        if self._background.results:
            self._integrate()
        if self._pool.free_blocks < n:
            self._grow(n)
        return self._pool.free_blocks

    def take(self, n: int) -> list[int]:
        """Hand out n blocks that `ensure` has made ready.

        Raises:
            ValueError: fewer are ready.
        """
        pool = self._pool
        block_ids = pool.take(n)
        self._least_empty = min(self._least_empty, pool.empty_pages)
        self._touch()
        if pool.empty_pages + pool.mapping_pages < self._ahead.low:
            self._map_ahead()
        return block_ids

    def give(self, block_ids: Sequence[int]) -> None:
        """Take blocks back. Call it when the engine frees them, with older steps in flight or not.

        Raises:
            ValueError: a block is not handed out; none was taken back.
        """
        self._pool.give(block_ids)
        if self._idle:
            self._leave_baseline()

    def give_all(self) -> None:
        """Take back every block that is handed out."""
        self.give(self._pool.in_use())

    def step_scheduled(self) -> None:
        """A step is about to be scheduled (StepClock.step_scheduled). Raises: background errors."""
        self.steps.step_scheduled()
        self._touch()
        if self._background.results:
            self._integrate()

    def step_finished(self) -> None:
        """The oldest step in flight has finished on every rank.

        Raises:
            ValueError: no step is in flight. Also: background errors.
        """
        self.steps.step_finished()
        self._touch()
        if self._background.results:
            self._integrate()
        pool = self._pool
        if pool.empty_pages + pool.mapping_pages < self._ahead.low:
            self._map_ahead()
        if self._last_active >= self._window_end:
            self._close_window()
        self._shed()

    def tick(self) -> None:
        """Do what is due while the engine sleeps. Call it after `wake`; harmless at any other time.

        Raises: background errors.
        """
        now = self._clock()
        if self._background.results:
            self._integrate()
        if not self._commits.demand.blocked(now):
            self._commits.demand.until = None  # promise unmapped pages again; one more failure still pauses longer
        if self._owner_deadline is not None and self._owner_deadline <= now:
            self._owner_deadline = None
        if now - self._last_active >= self.settings.idle_s:
            self._shrink_to_baseline()
        self._shed()
        self._background.arm(self._next_deadline())

    def wake_at(self, when: float | None) -> None:
        """Have `wake` called at this time of the clock too (the owner's own business); None: not any more.

        Each call replaces the one before; the time is forgotten at the first `tick` after it has come.
        """
        self._owner_deadline = when
        if when is not None:
            self._arm_by(when)

    def set_limit(self, pages: int | None) -> int:
        """Change how many pages may be mapped at once, page 0 included; None: all.

        A lower limit than what is in use is reached as memory frees; until then nothing more is mapped (where the limit
        binds, see KVSettings). A higher one takes effect at once.

        Returns:
            Pages that are mapped beyond the limit still (`pages_over_limit`).

        Raises:
            ValueError: pages < 1. Also: background errors.
        """
        limit = self._checked_limit(pages)
        if self._background.results:
            self._integrate()
        raised = limit > self._limit
        self._limit = limit
        if raised:
            self._commits.demand.reset()
            self._commits.ahead.reset()
            if not self._idle and self._pool.empty_pages + self._pool.mapping_pages < self._ahead.low:
                self._map_ahead()
        self._shed()
        return self.pages_over_limit

    @property
    def pages_over_limit(self) -> int:
        """Mapped pages beyond the limit: held by blocks in use, or about to go. 0: the limit is kept."""
        return max(0, self._pool.committed_pages - self._limit)

    @property
    def pages_held_over_limit(self) -> int:
        """Those of them that blocks in use hold: no waiting helps, only freeing."""
        return max(0, self._pool.mapped_pages - self._pool.empty_pages - self._limit)

    def stats(self) -> KVStats:
        """Numbers for metrics and tests. Raises: background errors."""
        if self._background.results:
            self._integrate()
        pool, commits = self._pool, self._commits
        return KVStats(
            mapped_pages=pool.committed_pages - pool.mapping_pages,
            touched_pages=pool.touched_pages,
            free_pages=pool.empty_pages,
            retiring_pages=pool.retiring_pages + pool.unmapping_pages,
            limit_pages=self._limit,
            in_use_blocks=pool.in_use_blocks,
            maps=commits.maps,
            unmaps=commits.unmaps,
            failed_maps=commits.failed_maps,
            failed_unmaps=commits.failed_unmaps,
            stalls=self._stalls,
            stalled_steps=self._stalled_steps,
            stall_seconds=self._stall_seconds,
            steps=self.steps.scheduled,
        )

    def _checked_limit(self, pages: int | None) -> int:
        check_limit(pages)
        return self._pool.num_pages if pages is None else min(pages, self._pool.num_pages)

    def _allowance(self, *, owner_asks: bool = True) -> int:
        """Pages that are not in service and may come into it under the limit."""
        return max(0, self._bound(owner_asks) - self._pool.mapped_pages - self._commits.quarantined_pages)

    def _mappable(self, pages: int, *, owner_asks: bool = True) -> int:
        """How many of these may be mapped at once without passing the limit."""
        return min(pages, self._bound(owner_asks) - self._pool.committed_pages)

    def _bound(self, owner_asks: bool) -> int:
        return self._limit if self.settings.limit_binds or not owner_asks else self._pool.num_pages

    def _grow(self, n: int) -> None:
        """Make n blocks ready where that is possible, waiting for the ranks."""
        pool, commits, started = self._pool, self._commits, None
        while n > pool.free_blocks and not commits.closed:
            pages = -(-(n - pool.free_blocks) // pool.blocks_per_page)
            pages -= pool.reclaim(min(pages, self._allowance()))
            now = self._clock()
            if pages <= 0 or commits.demand.blocked(now):
                break
            commits.begin_map(self._mappable(pages - pool.mapping_pages), urgent=True)
            if started is None:
                self._map_ahead(spoken_for=pages)  # behind it: the next request of this step finds something
            room_comes = self._allowance() > 0 and commits.unmaps_under_way()
            if not pool.mapping_pages and not room_comes:
                break
            started = now if started is None else started
            self._background.wait_result()
            self._integrate()
        if started is not None:
            self._stalls += 1
            self._stall_seconds += self._clock() - started
            if self._last_stalled_step != self.steps.scheduled:
                self._last_stalled_step = self.steps.scheduled
                self._stalled_steps += 1
                if self._had_reserve:
                    self._ahead.outrun()
                self._had_reserve = True

    def _map_ahead(self, spoken_for: int = 0) -> None:
        """Fill the reserve up, first with pages that were about to go, beside pages under way that are spoken for."""
        pool, commits, now = self._pool, self._commits, self._last_active
        allowance = self._allowance(owner_asks=False)
        want = min(self._ahead.high + spoken_for - pool.empty_pages, allowance) - pool.mapping_pages
        if want <= 0:
            return
        want -= pool.reclaim(want)
        if not commits.ahead.blocked(now) and not commits.demand.blocked(now):
            commits.begin_map(self._mappable(want, owner_asks=False), urgent=False)

    def _retire(self, n: int) -> None:
        self._pool.retire(n, self.steps.scheduled)
        self._least_empty = min(self._least_empty, self._pool.empty_pages)

    def _close_window(self) -> None:
        """Retire what nobody needed throughout the window that ends now."""
        self._retire(self._least_empty - self._ahead.high)
        self._least_empty = self._pool.empty_pages
        self._window_end = self._last_active + self.settings.idle_s

    def _shrink_to_baseline(self) -> None:
        pool = self._pool
        self._idle = True
        if self.steps.scheduled != self.steps.finished:
            return  # a long step: not idle, and its end comes back here by way of _touch
        if pool.mapping_pages:  # they arrive as empty pages: look again later
            self._touch()
            return
        self._ahead.ease()
        self._had_reserve = False
        other_free_blocks = pool.free_blocks - pool.empty_pages * pool.blocks_per_page
        self._retire(pool.empty_pages - (0 if other_free_blocks else 1))

    def _shed(self) -> None:
        """Retire what is beyond the limit, and have unmapped what no step in flight can touch any more."""
        excess = self._pool.mapped_pages + self._pool.mapping_pages - self._limit
        if excess > 0:
            self._retire(excess)
        self._commits.begin_unmaps(self.steps.finished)

    def _integrate(self) -> None:
        self._commits.integrate()
        until = self._commits.next_attempt()
        if until is not None:
            self._arm_by(until)

    def _touch(self) -> None:
        self._last_active = self._clock()
        if self._idle:
            self._leave_baseline()

    def _leave_baseline(self) -> None:
        self._idle = False
        self._arm_by(self._last_active + self.settings.idle_s)

    def _next_deadline(self) -> float | None:
        times = (
            None if self._idle else self._last_active + self.settings.idle_s,
            self._commits.next_attempt(),
            self._owner_deadline,
        )
        return min((time for time in times if time is not None), default=None)

    def _arm_by(self, when: float) -> None:
        deadline = self._background.deadline
        if deadline is None or when < deadline:
            self._background.arm(when)
