"""Repeat the tests of failures, and tell for each how often it held and how long it took.

    python tools/chaos.py ROUNDS PYTEST_ARGS...

They are those marked `chaos`: somebody is killed, hangs or is cut off, and within a bound everything has ended, or
serves again. What fails once in a hundred runs is found by running a hundred. Exit status 1 where one failed.

Needs nothing beyond the standard library.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent


def run_once(args: list[str]) -> Iterator[tuple[str, bool, float]]:
    """One round: name, whether it held, seconds."""
    with tempfile.TemporaryDirectory(prefix="kvlaunch-chaos-") as folder:
        report = Path(folder) / "report.xml"
        command = [str(ROOT / ".venv" / "vllm" / "bin" / "python"), "-m", "pytest", "-q", "-m", "chaos and not sglang"]
        environ = {**os.environ, "KVLAUNCH_ALL": "1"}  # also the rows that `make test` leaves out, being like others
        subprocess.run([*command, f"--junitxml={report}", *args], cwd=ROOT, check=False, env=environ)
        if not report.exists():  # pytest was ended, or did not start
            return
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                held = case.find("failure") is None and case.find("error") is None
                yield case.get("name", ""), held, float(case.get("time", "0"))


def main() -> int:
    rounds, args = int(sys.argv[1]), sys.argv[2:]
    found: dict[str, list[tuple[bool, float]]] = {}
    for number in range(rounds):
        print(f"== round {number + 1} of {rounds}", flush=True)
        for name, held, seconds in run_once(args):
            found.setdefault(name, []).append((held, seconds))
    print(f"\n{'held':>9}  {'median s':>8}  {'most s':>8}  what")
    for name, runs in sorted(found.items()):
        times = [seconds for _, seconds in runs]
        share = f"{sum(ok for ok, _ in runs)} of {len(runs)}"
        print(f"{share:>9}  {statistics.median(times):8.1f}  {max(times):8.1f}  {name}")
    if not found:
        print("no test was run")
    return 0 if found and all(ok for runs in found.values() for ok, _ in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
