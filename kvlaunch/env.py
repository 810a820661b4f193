"""The environment contract between the launcher and the code plugged into an engine: the one module that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_ID = "KVLAUNCH_RUN_ID"
RUN_DIR = "KVLAUNCH_RUN_DIR"
NODE_RANK = "KVLAUNCH_NODE_RANK"
EPOCH = "KVLAUNCH_EPOCH"
LAUNCHER_PID = "KVLAUNCH_LAUNCHER_PID"
LOCAL_ADDR = "KVLAUNCH_LOCAL_ADDR"
AGENT_PID = "KVLAUNCH_AGENT_PID"
GLOBAL_RANK = "KVLAUNCH_GLOBAL_RANK"
WORLD_SIZE = "KVLAUNCH_WORLD_SIZE"
TP_RANK = "KVLAUNCH_TP_RANK"
PP_RANK = "KVLAUNCH_PP_RANK"
SECRET = "KVLAUNCH_SECRET"
"""What the nodes of a run share, so that they know each other (kvlaunch/secret.py)."""
FAULT = "KVLAUNCH_TEST_FAULT"
"""Tests only: names a fault to inject."""


@dataclass(frozen=True, slots=True)
class RunEnv:
    """What a process learns from its environment about the run that it belongs to."""

    run: str
    run_dir: Path
    node_rank: int
    epoch: int
    """Restart generation of the engine: 0, then one more for each restart."""
    local_addr: str
    """Address by which the other nodes reach this one; empty for one node."""
    launcher_pid: int
    """Process whose death ends the run, 0 for none."""
    fault: str
    """Fault to inject (tests), empty for none."""


def read_run_env(environ: Mapping[str, str] | None = None) -> RunEnv | None:
    """The run that this process belongs to, or None where kvlaunch did not start it."""
    env = os.environ if environ is None else environ
    run, run_dir = env.get(RUN_ID), env.get(RUN_DIR)
    if not run or not run_dir:
        return None
    return RunEnv(
        run=run,
        run_dir=Path(run_dir),
        node_rank=int(env.get(NODE_RANK, "0")),
        epoch=int(env.get(EPOCH, "0")),
        local_addr=env.get(LOCAL_ADDR, ""),
        launcher_pid=int(env.get(LAUNCHER_PID, "0")),
        fault=env.get(FAULT, ""),
    )
