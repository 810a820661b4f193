"""python -m benchmarks [NAME...] [options]: measure, print tables, write benchmarks/results/<name>.json."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks import commit, memory, overhead, scale, serve, start

RESULTS = Path(__file__).parent / "results"
NAMES = ("commit", "scale", "overhead", "memory", "start")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="See docs/benchmarks.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; all where none is given")
    parser.add_argument(
        "--engine", choices=("vllm", "sglang"), default="vllm", help="for overhead, memory and start (default: vllm)"
    )
    parser.add_argument("--engines", type=int, default=4, help="overhead: pairs of engines (default: 4)")
    parser.add_argument("--pairs", type=int, default=8, help="overhead: pairs of rounds on each of them (default: 8)")
    parser.add_argument("--seconds", type=float, default=5.0, help="overhead: seconds a round (default: 5)")
    parser.add_argument("--topologies", default="1x1,2x2", help="overhead: tp x pp, with commas (default: 1x1,2x2)")
    parser.add_argument("--reserve", default="512MiB", help="memory: kv.reserve (default: 512MiB)")
    parser.add_argument("--starts", type=int, default=5, help="start: pairs of starts (default: 5)")
    parser.add_argument("--start-topologies", default="2x2", help="start: tp x pp, with commas (default: 2x2)")
    parser.add_argument("--operations", type=int, default=200, help="scale: commits for each number (default: 200)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON files")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    options.names = options.names or list(NAMES)
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended
    with serve.private_runs():
        for name in options.names:
            print(f"== {name}", flush=True)
            if name == "commit":
                options.results.mkdir(parents=True, exist_ok=True)
                commit.main(["--json", str(options.results / "commit.json")])
                continue
            module = {"scale": scale, "overhead": overhead, "memory": memory, "start": start}[name]
            result = module.run(options)
            serve.save(options.results, name if options.engine == "vllm" else f"{name}-{options.engine}", result)
            print(module.table(result), flush=True)


if __name__ == "__main__":
    main()
