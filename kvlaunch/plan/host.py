"""What the machine offers, found without torch or an engine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import kvlaunch
from kvlaunch.errors import PlanError
from kvlaunch.plan.address import address_towards

if TYPE_CHECKING:
    from kvlaunch.plan.types import LaunchPlan

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host. `probe_host` finds it; tests write it down."""

    cpus: int
    """Logical CPUs that this process may use."""
    numa_nodes: int
    """NUMA nodes with a CPU that this process may use."""
    memory_bytes: int
    """Physical memory, or the limit of the control group where that is smaller."""
    gpus: int
    """GPUs of the machine, visible or not."""
    cuda_visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES as it is set; None where it is not."""
    local_addr: str | None = None
    """Address by which the other nodes of a run reach this one; None for one node, or where it is not known."""
    python: str
    version: str
    """kvlaunch's."""

    @property
    def cuda_visible(self) -> tuple[str, ...]:
        """Devices that a CUDA process started here would see.

        Raises:
            PlanError: CUDA_VISIBLE_DEVICES names a device twice.
        """
        return visible_devices(self.cuda_visible_devices, self.gpus)


def visible_devices(declared: str | None, gpus: int) -> tuple[str, ...]:
    """Devices that a process with this CUDA_VISIBLE_DEVICES sees on a machine with so many GPUs.

    The rule is CUDA's (CUDA C++ Programming Guide, environment variables): devices are listed by index or UUID; the
    first entry that names no device hides itself and all that follow.

    Raises:
        PlanError: a device is named twice; CUDA then shows none at all.
    """
    if declared is None:
        return tuple(str(i) for i in range(gpus))
    entries = declared_devices(declared)
    seen = []
    for entry in entries:
        if gpus == 0 or (entry.isdigit() and int(entry) >= gpus):
            break
        seen.append(entry)
    return tuple(seen)


def declared_devices(declared: str) -> tuple[str, ...]:
    """Entries of CUDA_VISIBLE_DEVICES, up to the first that can name no device.

    Raises:
        PlanError: a device is named twice.
    """
    entries: list[str] = []
    for entry in (part.strip() for part in declared.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+", entry):
            break
        if entry in entries:
            raise PlanError(
                f"{CUDA_VISIBLE}={declared} names device {entry} twice: each rank needs a GPU of its own, "
                "and CUDA shows no device at all then.",
                hint=f"List every device once, as in {CUDA_VISIBLE}=0,1.",
            )
        entries.append(entry)
    return tuple(entries)


def probe_host(environ: Mapping[str, str] | None = None, *, endpoint: str | None = None) -> HostFacts:
    """Facts of this machine. Reads /proc, /sys and /dev; starts nothing and imports nothing heavy.

    Args:
        endpoint: where the nodes of a run meet, HOST:PORT; None for one node.
    """
    env = os.environ if environ is None else environ
    return HostFacts(
        cpus=len(os.sched_getaffinity(0)),
        numa_nodes=_numa_nodes(),
        memory_bytes=_memory_bytes(),
        gpus=_count("/dev", r"nvidia\d+"),
        cuda_visible_devices=env.get(CUDA_VISIBLE),
        local_addr=address_towards(endpoint) if endpoint else None,
        python=sys.executable,
        version=kvlaunch.__version__,
    )


def check_host(plan: LaunchPlan, host: HostFacts) -> None:
    """Refuse to start a plan that this host cannot carry. `plan` itself may be for another machine.

    Raises:
        PlanError: too few GPUs are seen, or the weights (and a static KV cache) are larger than the memory.
    """
    local = max(len(node.ranks) for node in plan.nodes)
    if plan.device == "cuda":
        declared = _declared(plan, host)
        seen = visible_devices(declared, host.gpus)
        if len(seen) < local:
            raise too_few_devices(seen, local, declared)
        return
    on_node = [rank for rank in plan.ranks if rank.node_rank == 0]
    weights = sum(rank.weight_bytes for rank in on_node)
    static = plan.kv.num_blocks * sum(rank.kv_bytes_per_block for rank in on_node) if plan.kv.mode == "static" else 0
    if weights + static > host.memory_bytes:
        parts = f"{_gib(weights)} GiB of weights" + (f" and {_gib(static)} GiB of static KV cache" if static else "")
        raise PlanError(
            f"{plan.model.name} needs {parts} on this host, which has {_gib(host.memory_bytes)} GiB of memory.",
            hint="Use a smaller model" + (", kv=elastic or a smaller kv.reserve." if static else " or more nodes."),
        )


def too_few_devices(seen: tuple[str, ...], needed: int, declared: str | None) -> PlanError:
    """The error for a CUDA engine that sees fewer devices than it has ranks on this node."""
    why = f"{CUDA_VISIBLE} is {declared!r}" if declared is not None else "no variable hides any"
    return PlanError(
        f"device=cuda needs {needed} GPU{'s' if needed != 1 else ''} on this node, one a rank, "
        f"and sees {len(seen)} ({why}).",
        hint=f"Make {needed} visible, lower tp or pp, or use device=cpu.",
    )


def _declared(plan: LaunchPlan, host: HostFacts) -> str | None:
    if CUDA_VISIBLE in plan.nodes[0].unset:
        return None
    return plan.nodes[0].env.get(CUDA_VISIBLE, host.cuda_visible_devices)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}"


def _count(folder: str, pattern: str) -> int:
    try:
        names = [path.name for path in Path(folder).iterdir()]
    except OSError:
        return 0
    return sum(1 for name in names if re.fullmatch(pattern, name))


def _numa_nodes() -> int:
    allowed = os.sched_getaffinity(0)
    nodes = 0
    for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"):
        try:
            nodes += not allowed.isdisjoint(_cpu_list(path.read_text()))
        except OSError:
            continue
    return max(nodes, 1)


def _cpu_list(text: str) -> set[int]:
    """CPUs of the kernel's list format, `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
