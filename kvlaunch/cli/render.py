"""`kvlaunch render`."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvlaunch.config.compose import compose
from kvlaunch.config.keys import find
from kvlaunch.config.units import parse_bytes
from kvlaunch.errors import ConfigError
from kvlaunch.render.job import Job, make_job
from kvlaunch.render.kubernetes import KubernetesOptions
from kvlaunch.render.kubernetes import render as render_kubernetes
from kvlaunch.render.slurm import SlurmOptions
from kvlaunch.render.slurm import render as render_slurm

_SHARED = ("--cpus", "--memory", "--output", "--config-dir", "--help")
OWN = {
    "slurm": ("--time", "--partition", "--account", "--sbatch", "--before"),
    "kubernetes": ("--image", "--namespace", "--replicas", "--secret", "--with-secret"),
}
"""Options of each form, beside those that both take."""
_PLANNED = {
    "--nodes": "The plan says how many: nnodes=N",
    "--gpus": "The plan says how many, one a rank: device=cuda, and tp, pp and nnodes",
    "--gpus-per-node": "The plan says how many, one a rank: device=cuda, and tp, pp and nnodes",
}
"""Options that one may expect, and what stands in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Options of both forms, as typed."""

    cpus: int | None = None
    memory: str | None = None
    config_dir: Path | None = None
    output: Path | None = None


def slurm(overrides: Sequence[str], options: SlurmOptions, common: Common) -> int:
    """Write an sbatch script. Returns the exit code; raises KVLaunchError."""
    job = _job("slurm", overrides, common)
    _write(render_slurm(job, options), common.output, "submit it with: sbatch")
    return 0


def kubernetes(
    overrides: Sequence[str], options: KubernetesOptions, common: Common, *, with_secret: bool = False
) -> int:
    """Write a LeaderWorkerSet and its Service. Returns the exit code; raises KVLaunchError."""
    job = _job("kubernetes", overrides, common)
    if with_secret and job.needs_secret:
        options = replace(options, new_secret=_new_secret())
    text = render_kubernetes(job, options)
    _write(text, common.output, "apply it with: kubectl apply -f", private=options.new_secret is not None)
    return 0


def _new_secret() -> str:
    from kvlaunch.secret import new_secret

    return new_secret().text


def _job(form: str, overrides: Sequence[str], common: Common) -> Job:
    _check_options(form, overrides)
    memory_bytes = None if common.memory is None else parse_bytes(common.memory, what="--memory")
    if memory_bytes == 0:
        raise ConfigError("--memory 0: a node needs some.", hint="Leave it out for what the plan needs.")
    # Composed here and not as for `up`: where this command runs is not where the run will.
    composed = compose(overrides, config_dir=common.config_dir)
    return make_job(composed, overrides, config_dir=common.config_dir, cpus=common.cpus, memory_bytes=memory_bytes)


def _check_options(form: str, overrides: Sequence[str]) -> None:
    """Refuse words that were meant as options: whatever is none of the command's stands among the overrides.

    Raises:
        ConfigError: an option of the other form, or one spelled wrong.
    """
    for word in overrides:
        name = word.partition("=")[0]
        if not name.startswith("--") or find(name[2:].replace("-", "_")) is not None:
            continue
        for other, options in OWN.items():
            if other != form and name in options:
                raise ConfigError(f"{name} is an option of render {other}, not of render {form}.")
        if name in _PLANNED:
            raise ConfigError(f"There is no option {name!r}.", hint=_PLANNED[name])
        close = difflib.get_close_matches(name, (*OWN[form], *_SHARED), n=1, cutoff=0.75)
        if close:
            raise ConfigError(f"There is no option {name!r}.", hint=f"Did you mean {close[0]}?")


def _write(text: str, output: Path | None, what_next: str, *, private: bool = False) -> None:
    """To standard output, or to a file that nobody else may read where it is private."""
    if output is None:
        sys.stdout.write(text)
        return
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600 if private else 0o666)
    with open(fd, "w", encoding="utf-8") as f:
        if private:
            os.fchmod(fd, 0o600)
        f.truncate(0)
        f.write(text)
    print(f"wrote {output}; {what_next} {shlex.quote(str(output))}")
