"""Become the engine: `python -m kvlaunch.launch.enter RUN_DIR`, started by the agent.

Kept to the standard library and to few imports, since it stands before the engine's own start. Of several nodes the
plan says for each what to start; ${...} in it stands for what they learned when they met.
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
    run_dir, node_rank = Path(sys.argv[1]), int(os.environ[env.NODE_RANK])
    agent = int(os.environ[env.AGENT_PID])
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:  # it ended before the signal was set
        sys.exit(1)
    node = json.loads((run_dir / "plan.json").read_bytes())["nodes"][node_rank]
    for name in node["unset"]:
        os.environ.pop(name, None)
    known = _known()
    os.environ.update({name: _filled(value, known) for name, value in node["env"].items()})
    os.environ.update(
        {
            env.RUN_ID: run_dir.name,
            env.RUN_DIR: str(run_dir),
            env.NODE_RANK: str(node_rank),
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
        os.execvpe(node["argv"][0], [_filled(word, known) for word in node["argv"]], os.environ)
    except OSError as exc:
        sys.exit(f"cannot start {node['argv'][0]}: {exc.strerror}")


def _known() -> dict[str, str]:
    """What ${...} stands for. Empty on one node, where a plan has none of it."""
    addr = os.environ.get(env.LOCAL_ADDR)
    if not addr:
        return {}
    master, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return {
        "${MASTER_ADDR}": master,
        "${MASTER_PORT}": port,
        "${MASTER}": f"[{master}]:{port}" if ":" in master else f"{master}:{port}",
        "${LOCAL_ADDR}": addr,
        "${LOCAL_INTERFACE}": interface_of(addr),
    }


def interface_of(addr: str) -> str:
    """Name of the network interface that has this address; empty where none has."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == addr for entry in entries):
            return str(name)
    return ""


def _filled(text: str, known: dict[str, str]) -> str:
    for token, value in known.items():
        text = text.replace(token, value)
    return text


if __name__ == "__main__":
    main()
