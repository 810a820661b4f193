"""vLLM's OpenAI server with a fork server at its side: `python -m kvlaunch.engines.vllm.serve`, options are vLLM's."""

from __future__ import annotations


def main() -> None:
    from kvlaunch.engines.vllm import forking
    from kvlaunch.env import read_run_env

    run = read_run_env()
    if run is not None:
        forking.start(run.run_dir)

    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
