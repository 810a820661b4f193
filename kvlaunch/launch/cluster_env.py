"""What a cluster tells a process of its place: from the variables of SLURM or of a LeaderWorkerSet to the keys that a
run on several nodes needs.

SLURM: "output environment variables" in srun(1); host lists as `scontrol show hostnames` reads them. LeaderWorkerSet:
the variables that its webhook adds to every container (api/leaderworkerset/v1 of kubernetes-sigs/lws).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlaunch.errors import ConfigError

LWS_PORT = 29400
"""torchrun's default. A pod has a network of its own, so nobody else is there."""
SLURM_FIRST_PORT, SLURM_PORTS = 20000, 10000
"""Ports of rendezvous under SLURM: one for each job, since jobs share nodes; below those that Linux hands out."""

_MOST_HOSTS = 1 << 16
_MOST_ID = 64
"""Characters of rdzv.id."""
_STEP_STRIDE = 131
"""Steps of one job meet at ports that lie so far apart."""
_HOST = re.compile(r"(?:[^\s\[\],]|\[[0-9,-]+\])+")
_BY_HAND = "Give nnodes, node_rank and rdzv.endpoint yourself: what is given wins."


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for one key, and the variables that it was read from."""

    value: int | str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a cluster told about a run on several nodes."""

    where: str
    """Who told it: `step 4711.0 of SLURM`, `LeaderWorkerSet group vllm-0.vllm.default`."""
    settings: Mapping[str, Setting]
    """By key: nnodes, node_rank, rdzv.endpoint, rdzv.id and rdzv.backend."""

    def defaults(self, given: Mapping[str, Any]) -> dict[str, int | str]:
        """What to set where the user has set nothing.

        Args:
            given: keys that the user has set in any way, with their values; other keys do no harm. Another `nnodes`
                than the cluster's is a run of the user's own making, for which nothing here is meant.
        """
        if given.get("nnodes", self.nnodes) != self.nnodes:
            return {}
        return {key: setting.value for key, setting in self.settings.items() if key not in given}

    @property
    def nnodes(self) -> int:
        return int(self.settings["nnodes"].value)

    @property
    def line(self) -> str:
        """All of it with its origins, for a log."""
        parts = [f"{key}={setting.value} ({setting.origin})" for key, setting in self.settings.items()]
        return f"{self.where}: {', '.join(parts)}"


def recognise(environ: Mapping[str, str]) -> Found | None:
    """The place of this process in a group of several, or None where no cluster says that there is one.

    Inside a SLURM job only what srun started has one: the batch script itself runs once, whatever the job's size.

    Raises:
        ConfigError: the cluster runs something else than one process a node, or its variables contradict each other.
    """
    return _leader_worker_set(environ) or _slurm(environ)


def _leader_worker_set(environ: Mapping[str, str]) -> Found | None:
    address, size, index = (environ.get(f"LWS_{name}", "") for name in ("LEADER_ADDRESS", "GROUP_SIZE", "WORKER_INDEX"))
    if not address or not size:
        return None
    nnodes, node_rank = _number("LWS_GROUP_SIZE", size), _number("LWS_WORKER_INDEX", index)
    if nnodes < 2:
        return None
    _check_rank("LWS_WORKER_INDEX", node_rank, "LWS_GROUP_SIZE", nnodes)
    host = f"[{address}]" if ":" in address else address
    return Found(
        where=f"LeaderWorkerSet group {address}",
        settings={
            "nnodes": Setting(nnodes, "LWS_GROUP_SIZE"),
            "node_rank": Setting(node_rank, "LWS_WORKER_INDEX"),
            "rdzv.endpoint": Setting(f"{host}:{LWS_PORT}", "LWS_LEADER_ADDRESS"),
            # The leader's name is that of its group: set, group index and namespace.
            "rdzv.id": Setting(_short_id(address), "LWS_LEADER_ADDRESS"),
            "rdzv.backend": Setting("c10d", "LWS_GROUP_SIZE"),
        },
    )


def _short_id(text: str) -> str:
    cleaned = re.sub(r"[^\w.:-]", "-", text)
    if len(cleaned) <= _MOST_ID:
        return cleaned
    end = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{cleaned[: _MOST_ID - len(end) - 1]}-{end}"


def _slurm(environ: Mapping[str, str]) -> Found | None:
    job = environ.get("SLURM_JOB_ID", "")
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    # A heterogeneous job has a list of nodes for each component, and none of the whole.
    if not job or not step or environ.get("SLURM_HET_SIZE", "1") != "1":
        return None
    of_step = "SLURM_STEP_NODELIST" in environ and "SLURM_STEP_NUM_NODES" in environ
    count_names = ("SLURM_STEP_NUM_NODES",) if of_step else ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    list_names = ("SLURM_STEP_NODELIST",) if of_step else ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    count_name, count = _first(environ, *count_names)
    list_name, hosts = _first(environ, *list_names)
    if not count or not hosts:
        return None
    nnodes = _number(count_name, count)
    if nnodes < 2:
        return None
    node_rank = _number("SLURM_NODEID", environ.get("SLURM_NODEID", ""))
    _check_rank("SLURM_NODEID", node_rank, count_name, nnodes)
    _check_tasks(environ, nnodes)
    names = _hosts(list_name, hosts)
    if len(names) != nnodes:
        raise ConfigError(
            f"{list_name}={hosts} names {len(names)} hosts, and {count_name} says {nnodes}.", hint=_BY_HAND
        )
    job_number, step_number = _number("SLURM_JOB_ID", job), _number("SLURM_STEP_ID", step)
    return Found(
        where=f"step {job}.{step} of SLURM",
        settings={
            "nnodes": Setting(nnodes, count_name),
            "node_rank": Setting(node_rank, "SLURM_NODEID"),
            "rdzv.endpoint": Setting(
                f"{names[0]}:{slurm_port(job_number, step_number)}",
                f"first host of {list_name}, port from SLURM_JOB_ID",
            ),
            "rdzv.id": Setting(f"slurm-{job}" + (f".{step}" if step_number else ""), "SLURM_JOB_ID"),
            "rdzv.backend": Setting("c10d", count_name),
        },
    )


def slurm_port(job: int, step: int = 0) -> int:
    """Port where the nodes of a step meet."""
    return SLURM_FIRST_PORT + (job + _STEP_STRIDE * step) % SLURM_PORTS


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """The first of these variables that is set to something, and its value; the last name and "" where none is."""
    return next(((name, environ[name]) for name in names if environ.get(name)), (names[-1], ""))


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ConfigError(f"{name}={text!r}: a whole number was expected there.", hint=_BY_HAND)
    return int(text)


def _check_rank(name: str, rank: int, count_name: str, count: int) -> None:
    if rank >= count:
        raise ConfigError(f"{name}={rank} does not fit {count_name}={count}.", hint=_BY_HAND)


def _check_tasks(environ: Mapping[str, str], nnodes: int) -> None:
    name, tasks = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks and _number(name, tasks) != nnodes:
        raise ConfigError(
            f"SLURM started {tasks} tasks on {nnodes} nodes ({name}): kvlaunch wants one a node, and starts the ranks "
            "itself.",
            hint="Use srun --ntasks-per-node=1, with all of a node's GPUs for its task.",
        )


def _hosts(name: str, text: str) -> list[str]:
    try:
        return expand_hosts(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is no list of hosts: {error}.", hint=_BY_HAND) from None


def expand_hosts(text: str) -> list[str]:
    """Host names of a list in SLURM's form, in its order: `gpu[01-03,07],cpu5` is gpu01 gpu02 gpu03 gpu07 cpu5.

    A name may have several brackets; the last one counts fastest. Numbers keep the width of the first of their range.

    Raises:
        ValueError: it is no such list, or names more than 65,536 hosts.
    """
    found: list[str] = []
    for element in re.split(r",(?![^\[\]]*\])", text):
        if not _HOST.fullmatch(element):
            raise ValueError(f"{element!r} is no host, nor hosts with numbers in brackets")
        parts = re.split(r"\[([^\]]*)\]", element)
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        if len(found) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise ValueError(f"it names more than {_MOST_HOSTS} hosts")
        found += ["".join(combination) for combination in itertools.product(*choices)]
    return found


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise ValueError(f"[{ranges}] is no list of numbers and ranges")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MOST_HOSTS:
            raise ValueError(f"the range {part} is empty or too long")
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found
