"""SGLang's server with a fork server at its side: `python -m kvlaunch.engines.sglang.serve`, options are SGLang's."""

from __future__ import annotations

import runpy


def main() -> None:
    from kvlaunch.engines import forking
    from kvlaunch.env import read_run_env

    run = read_run_env()
    if run is not None:
        forking.start(run.run_dir, "kvlaunch.engines.sglang.preload")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
