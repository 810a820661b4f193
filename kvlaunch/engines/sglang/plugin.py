"""The entry point of group `sglang.srt.plugins`.

SGLang loads it in the API process, the detokenizer and every scheduler. Outside a run of kvlaunch it does nothing.
"""

from __future__ import annotations

import multiprocessing


def register() -> None:
    """Plug kvlaunch into this SGLang process, where kvlaunch started it.

    Raises:
        SystemExit: kvlaunch cannot work with this SGLang. SGLang would log any other exception and go on.
    """
    from kvlaunch.env import read_run_env

    run = read_run_env()
    if run is None:
        return

    from kvlaunch.engines.process import FailureRecorder
    from kvlaunch.engines.sglang import processes
    from kvlaunch.errors import CompatibilityError
    from kvlaunch.launch.paths import RunPaths
    from kvlaunch.launch.tether import tether

    if multiprocessing.parent_process() is not None:
        # A rank has its hooks already, from processes.rank_main; the detokenizer needs none.
        tether(run.launcher_pid)
        return
    try:
        processes.install(run)
    except CompatibilityError as error:
        paths = RunPaths(run.run_dir)
        FailureRecorder(paths, "api", None, paths.engine_log).record(error)
        raise SystemExit(f"error: {error.message}") from error
