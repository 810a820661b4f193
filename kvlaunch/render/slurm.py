"""An sbatch script: one agent a node, started by srun. sbatch(1) and srun(1) say what its options mean."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from kvlaunch import env
from kvlaunch.errors import ConfigError
from kvlaunch.launch.cluster_env import SLURM_FIRST_PORT, SLURM_PORTS
from kvlaunch.plan.ids import slug
from kvlaunch.render.job import Job

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What the plan does not say.

    Raises:
        ConfigError: a value that sbatch would not take, or would take for something else.
    """

    time: str | None = None
    """Limit of the job as sbatch takes it: `30` minutes, `8:00:00`, `2-0`; None: the partition's own."""
    partition: str | None = None
    account: str | None = None
    more: tuple[str, ...] = ()
    """Further options of sbatch, `--qos=high` or `qos=high`."""
    before: tuple[str, ...] = ()
    """Lines of shell that run before: `module load cuda`, `source venv/bin/activate`."""

    def __post_init__(self) -> None:
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time}: sbatch takes minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS.",
                hint="For example: --time 8:00:00",
            )
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None and not re.fullmatch(r"[\w.,:@+-]+", value):
                raise ConfigError(f"{option} {value!r}: that is no name of SLURM's.", hint=f"For example: {option} gpu")
        for option in self.more:
            if not re.fullmatch(r"(--)?[a-z][a-z0-9-]*(=.*)?|-[A-Za-z].*", option) or not option.isprintable():
                raise ConfigError(
                    f"--sbatch {option!r}: that is no option of sbatch.", hint="For example: --sbatch=--qos=high"
                )


def render(job: Job, options: SlurmOptions) -> str:
    """The script."""
    return "\n".join([*_header(job, options), *_body(job, options)]) + "\n"


def _header(job: Job, options: SlurmOptions) -> Iterator[str]:
    plan = job.plan
    directives = {
        "job-name": slug(plan.name, 64),
        "nodes": str(plan.nnodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.cpus),
        "gpus-per-node": str(job.ranks_per_node) if plan.device == "cuda" else None,
        "mem": f"{math.ceil(job.memory_bytes / _MIB)}M",
        "output": "%x-%j.log",
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        # Before the time is up, as early as the run may take to end by itself. Without `B:` it goes to the steps.
        "signal": f"TERM@{job.grace_s}",
    }
    yield "#!/bin/bash"
    yield from (f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None)
    yield from (f"#SBATCH {option if option.startswith('-') else f'--{option}'}" for option in options.more)
    yield "#"
    yield f"# {' '.join(job.summary.split())}."
    yield "# Written by kvlaunch render slurm. Submit it with sbatch; scancel drains the run and ends it."
    if plan.server.host in ("127.0.0.1", "localhost", "::1"):
        yield f"# The server listens on {plan.server.host}, so it is reached from the job's first node alone. With"
        yield "# server.host=0.0.0.0 it is open to the whole network of the cluster, and asks nobody who they are."
    yield ""


def _body(job: Job, options: SlurmOptions) -> Iterator[str]:
    yield "set -euo pipefail"
    yield ""
    if options.before:
        # Scripts of other people's often read variables that are not set.
        yield from ("set +u", *options.before, "set -u", "")
    words = [shlex.quote(word) for word in job.command]
    if job.plan.nnodes > 1:
        if "rdzv.endpoint" not in job.given:
            yield _ENDPOINT
            words.append('rdzv.endpoint="$first:$port"')
        if "rdzv.id" not in job.given:
            words.append('rdzv.id="slurm-$SLURM_JOB_ID"')
    if job.needs_secret:
        yield _SECRET
    yield _SRUN
    start = f"exec srun --nodes={job.plan.nnodes} --ntasks-per-node=1 --cpus-per-task={job.cpus}"
    yield f"{start} --kill-on-bad-exit=1 --export=ALL --label \\"
    yield f"  {words[0]} {words[1]}" + "".join(f" \\\n  {word}" for word in words[2:])


_ENDPOINT = f"""\
# The nodes meet on the first one, which is node 0 and serves HTTP, at a port of this job's own. (No pipe to head: that
# would end scontrol early, and with pipefail the script.)
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${{hosts%%$'\\n'*}}
port=$(({SLURM_FIRST_PORT} + SLURM_JOB_ID % {SLURM_PORTS}))
"""

_SECRET = f"""\
# Who knows the run's secret may command its KV listeners. It is made here, for this job, and reaches the nodes in a
# variable: that needs no shared folder, leaves no file, and is on no command line and in no log.
if [[ -z "${{{env.SECRET}:-}}" ]]; then
  {env.SECRET}=$(kvlaunch secret new)
fi
export {env.SECRET}
"""

_SRUN = """\
# One agent a node, which starts the node's ranks. If it fails on one, srun ends it on all. --export says so even where
# the job was submitted with another; --cpus-per-task is not inherited from the job since SLURM 22.05."""
