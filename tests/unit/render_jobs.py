"""Jobs to render, for the tests of what is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlaunch.config.compose import compose
from kvlaunch.render.job import Job, make_job

TINY = ("model=tiny-qwen3", "device=cpu")
LARGE = ("model=Qwen3-8B", "device=cuda", "tp=2", "pp=2")
TWO = "nnodes=2"

AWKWARD = (
    "name=a: #run",
    'engine.args.o={"a": [1, "x, y"], "b": \'$HOME\'}',
    'engine.env.A=$(touch /nowhere) `id` $$ $x \\ ; & | > "quoted"',
    "engine.env.B=two\nlines\n#SBATCH --account=other",
    "engine.env.C=ä€ ~ * ? !",
    "engine.env.D=",
)
"""Overrides whose values mean something to a shell, to YAML or to Kubernetes."""


def job(*overrides: str, config_dir: Path | None = None, **options: Any) -> Job:
    return make_job(compose(overrides, config_dir=config_dir), overrides, config_dir=config_dir, **options)
