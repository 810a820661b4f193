"""Faults that the tests inject into an engine's ranks through `KVLAUNCH_TEST_FAULT`.

Several faults are separated by `;`, the fields of one by `,`:

    unmapped,stage=1               ranks of stage 1 acknowledge every map and do nothing
    map-fails,rank=3,after=2,times=1   rank 3 refuses `times` maps after `after` good ones
    stall,rank=2,after=2,seconds=20    rank 2 does not answer for so long, once
    raise,rank=1,at=weights        rank 1 raises when it has loaded its weights
    eager-unmap                    no fault: empty pages go back as soon as the steps in flight allow it
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvlaunch.kv.ipc.messages import Map, Unmap
from kvlaunch.kv.memory.base import Region
from kvlaunch.plan.types import RankPlan


@dataclass(slots=True)
class Fault:
    kind: str
    options: dict[str, str] = field(default_factory=dict)

    def number(self, key: str, default: float) -> float:
        return float(self.options.get(key, default))

    def concerns(self, rank: RankPlan) -> bool:
        wanted = {"rank": rank.global_rank, "stage": rank.pp_rank}
        return all(int(self.options[k]) == v for k, v in wanted.items() if k in self.options)


def parse_faults(text: str) -> list[Fault]:
    faults = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        kind, *fields = part.split(",")
        faults.append(Fault(kind, dict(f.split("=", 1) for f in fields)))
    return faults


def faults_of(text: str, rank: RankPlan) -> list[Fault]:
    return [fault for fault in parse_faults(text) if fault.concerns(rank)]


def unmaps_eagerly(text: str) -> bool:
    return any(f.kind == "eager-unmap" for f in parse_faults(text))


def leaves_unmapped(faults: Sequence[Fault]) -> bool:
    return any(f.kind == "unmapped" for f in faults)


def raise_at(faults: Sequence[Fault], where: str) -> None:
    for fault in faults:
        if fault.kind == "raise" and fault.options.get("at") == where:
            raise RuntimeError(f"injected fault at {where}")


def request_fault(faults: Sequence[Fault]) -> Callable[[Map | Unmap], None] | None:
    """What a RankMemory calls before it applies a request; None where there is nothing to inject."""
    active = [f for f in faults if f.kind in ("map-fails", "stall")]
    if not active:
        return None
    lock = threading.Lock()
    seen = 0

    def before(request: Map | Unmap) -> None:
        nonlocal seen
        if not isinstance(request, Map):
            return
        with lock:
            seen += 1
            count = seen
        for fault in active:
            after = int(fault.number("after", 0))
            if not after < count <= after + int(fault.number("times", 1)):
                continue
            if fault.kind == "stall":
                time.sleep(fault.number("seconds", 20))
            else:
                raise OSError(errno.ENOMEM, "injected: no memory for this page")

    return before


class _Forgetful:
    """A region that acknowledges every map but the first (the null block's page) and leaves the memory as it is."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)

    def map_many(self, ranges: Sequence[tuple[int, int]]) -> None:
        if self._first:
            self._region.map_many(ranges)
        self._first = False

    def unmap_many(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Nothing, on purpose."""


def forgetful(region: Region) -> Region:
    """What a stage that was forgotten looks like to the others: it agrees to everything and has no memory."""
    return cast("Region", _Forgetful(region))
