"""vLLM's OpenAI server with a fork server at its side: `python -m kvlaunch.engines.vllm.serve`, options are vLLM's."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path


def main() -> None:
    from kvlaunch.engines import forking
    from kvlaunch.env import read_run_env

    run = read_run_env()
    if run is not None:
        if "LD_PRELOAD" not in os.environ and (gomp := _torch_libgomp()):
            os.environ["LD_PRELOAD"] = gomp
        forking.start(run.run_dir, "kvlaunch.engines.vllm.preload")

    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


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
