"""vLLM's OpenAI server with a fork server at its side: `python -m kvlaunch.engines.vllm.serve`, options are vLLM's.

With --headless it is the part of a node that serves no HTTP: `vllm serve --headless` without vLLM's console script,
which asks for the metadata of a distribution that may have another name.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path


def main() -> None:
    from kvlaunch.engines import forking
    from kvlaunch.env import read_run_env
    from kvlaunch.plan.types import LaunchPlan

    run = read_run_env()
    if run is not None and LaunchPlan.load(run.run_dir / "plan.json").device == "cpu":
        if "LD_PRELOAD" not in os.environ and (gomp := _torch_libgomp()):
            os.environ["LD_PRELOAD"] = gomp
        forking.start(run.run_dir, "kvlaunch.engines.vllm.preload")

    if "--headless" in sys.argv:
        _serve_headless()
        return
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _serve_headless() -> None:
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    args.api_server_count = 0
    run_headless(args)


def _torch_libgomp() -> str | None:
    """What vLLM preloads in its processes on the CPU (check_and_update_config in vllm/platforms/cpu.py)."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations or platform.machine() != "x86_64":
        return None
    folder = Path(torch.submodule_search_locations[0])
    found = [*(folder.parent / "torch.libs").glob("libgomp*.so*"), *(folder / "lib").glob("libgomp*.so*")]
    return str(found[0]) if found else None


if __name__ == "__main__":
    main()
