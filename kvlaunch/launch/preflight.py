"""What is checked, and made, before a run starts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import kvlaunch
from kvlaunch.errors import ConfigError, KVLaunchError
from kvlaunch.launch.ports import require_free
from kvlaunch.launch.reporter import Reporter
from kvlaunch.launch.signals import Signals
from kvlaunch.launch.tail import last_lines
from kvlaunch.plan.address import is_local
from kvlaunch.plan.host import check_host, probe_host
from kvlaunch.plan.tiny import is_tiny
from kvlaunch.plan.types import LaunchPlan
from kvlaunch.secret import load_secret, require_secret

_PROBE = """
import importlib.util as u, json, sys
found = {m: u.find_spec(m) is not None for m in sys.argv[1:]}
version = None
if found["kvlaunch"]:
    import kvlaunch
    version = kvlaunch.__version__
print(json.dumps({"missing": [m for m in found if not found[m]], "version": version}))
"""


def preflight(plan: LaunchPlan) -> None:
    """Refuse at once what cannot work.

    Raises:
        ConfigError: the interpreter of the engine's environment or a port is not usable.
        PlanError: the machine cannot carry the plan.
    """
    if not plan.rdzv.node_rank:  # another node serves
        require_free(plan.server.host, plan.server.port, f"server.port={plan.server.port}")
    host, _, port = plan.rdzv.endpoint.rpartition(":")
    if plan.nnodes == 1 and port.isdigit() and int(port) > 0:
        require_free(host.strip("[]"), int(port), f"rdzv.endpoint={plan.rdzv.endpoint}")
    if plan.nnodes > 1:
        require_node(plan)
    check_host(plan, probe_host())
    check_python(plan)


def require_node(plan: LaunchPlan) -> None:
    """Check what a run on several nodes needs on each of them.

    Raises:
        ConfigError: there is no secret that the KV listeners need, or local_addr is not this host's.
    """
    if plan.kv.mode == "elastic":
        require_secret(load_secret(plan.rdzv.secret_file), f"kv=elastic on {plan.nnodes} nodes")
    addr = plan.rdzv.local_addr
    if addr is not None and not is_local(addr):
        raise ConfigError(f"local_addr={addr}: this host has no such address.", hint="`ip addr` lists those it has.")


def check_python(plan: LaunchPlan) -> None:
    """Check that the engine's interpreter runs and finds kvlaunch, torch and the engine. Nothing big is imported.

    Raises:
        ConfigError: it does not.
    """
    python = plan.engine_python
    modules = ["kvlaunch", "torch", "msgspec", plan.engine]
    if python == sys.executable and all(importlib.util.find_spec(module) for module in modules):
        return
    try:
        answer = subprocess.run(
            [python, "-P", "-c", _PROBE, *modules], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"engine.python={python} cannot be run: {exc}", hint=_HINT) from exc
    if answer.returncode != 0:
        raise ConfigError(f"engine.python={python} is no usable Python: {answer.stderr.strip()[-500:]}", hint=_HINT)
    facts = json.loads(answer.stdout)
    if facts["missing"]:
        raise ConfigError(f"engine.python={python} has no {', '.join(facts['missing'])}.", hint=_HINT)
    if facts["version"] != kvlaunch.__version__:
        raise ConfigError(
            f"engine.python={python} has kvlaunch {facts['version']}, and this is kvlaunch {kvlaunch.__version__}.",
            hint="Install the same version in both environments.",
        )


_HINT = "Name the interpreter of an environment that has the engine and kvlaunch: engine.python=/path/to/bin/python"


def make_model(plan: LaunchPlan, signals: Signals, reporter: Reporter) -> None:
    """Make the tiny model on first use. Returns early when a signal asks for the end.

    Raises:
        KVLaunchError: it could not be made.
    """
    folder = Path(plan.model.path)
    if not plan.model.make_tiny or is_tiny(folder):
        return
    reporter.note(f"making {plan.model.name} in {folder} (first use)")
    log = folder.parent / f".{folder.name}.log"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [plan.engine_python, "-P", "-m", "kvlaunch.plan.tiny", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    while process.poll() is None:
        signals.wait(0.05)
        if signals.first is not None:
            process.kill()
            process.wait()
            return
    if process.returncode != 0:
        raise KVLaunchError(
            f"{plan.model.name} could not be made in {folder} (exit status {process.returncode}):\n{last_lines(log)}",
            hint=f"The whole story: {log}",
        )
    log.unlink(missing_ok=True)
