"""The entry point of group `vllm.general_plugins`.

vLLM loads it in the API process, the scheduler process and every worker. Outside a run of kvlaunch it does nothing.
An error raised here ends the process: an engine with half an adapter would compute wrong tokens.
"""

from __future__ import annotations


def register() -> None:
    """Plug kvlaunch into this vLLM process, where kvlaunch started it.

    Raises:
        CompatibilityError: the vLLM version is outside the tested window.
    """
    from kvlaunch.env import read_run_env

    run = read_run_env()
    if run is None:
        return

    from kvlaunch.engines.vllm import compat, processes

    compat.check_version()
    processes.install(run)
