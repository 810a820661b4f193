"""Become the engine: `python -m kvlaunch.launch.enter RUN_DIR NODE_RANK`, started by the agent.

Kept to the standard library and to few imports, since it stands before the engine's own start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from kvlaunch import env
from kvlaunch.launch.linux import set_parent_death_signal


def main() -> None:
    run_dir, node_rank = Path(sys.argv[1]), int(sys.argv[2])
    agent = int(os.environ[env.AGENT_PID])
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:  # it ended before the signal was set
        sys.exit(1)
    node = json.loads((run_dir / "plan.json").read_bytes())["nodes"][node_rank]
    for name in node["unset"]:
        os.environ.pop(name, None)
    os.environ.update(node["env"])
    os.environ.update(
        {
            env.RUN_ID: run_dir.name,
            env.RUN_DIR: str(run_dir),
            env.NODE_RANK: str(node_rank),
            env.EPOCH: os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        }
    )
    log = os.open(run_dir / "logs" / "engine.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if log > 2:
        os.close(log)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    try:
        os.execvpe(node["argv"][0], node["argv"], os.environ)
    except OSError as exc:
        sys.exit(f"cannot start {node['argv'][0]}: {exc.strerror}")


if __name__ == "__main__":
    main()
