"""`kvlaunch up`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from kvlaunch.cli.progress import TerminalReporter
from kvlaunch.launch.launcher import launch
from kvlaunch.launch.ports import hold_port, port_of
from kvlaunch.plan.types import LaunchPlan

if TYPE_CHECKING:
    from kvlaunch.config.schema import LaunchConfig


def run(config: LaunchConfig, *, detach: bool, verbose: bool, json_output: bool) -> int:
    """Plan, then execute the plan. Returns the exit code; raises KVLaunchError."""
    from kvlaunch.plan.host import probe_host
    from kvlaunch.plan.ids import meeting_point, new_run_id
    from kvlaunch.plan.planner import make_plan

    with contextlib.ExitStack() as stack:
        if config.server.port == 0:
            port = port_of(stack.enter_context(hold_port(config.server.host)))
            config = dataclasses.replace(config, server=dataclasses.replace(config.server, port=port))
        plan = make_plan(config, run=new_run_id(config), host=probe_host(endpoint=meeting_point(config)))
        return execute(plan, detach=detach, verbose=verbose, json_output=json_output)


def execute(plan: LaunchPlan, *, detach: bool = False, verbose: bool = False, json_output: bool = False) -> int:
    """Execute a plan with progress on the terminal. Returns the exit code; raises KVLaunchError."""
    with TerminalReporter(json_output=json_output) as reporter:
        return launch(plan, reporter, detach=detach, verbose=verbose)
