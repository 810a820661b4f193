"""Run the tests in the environment of each engine, and end with one closing line for all of them.

    python tools/run_tests.py PYTEST_ARGS...

Tests marked `sglang` run in .venv/sglang, all others in .venv/vllm: the engines pin different versions and cannot share
an interpreter. Those marked `contract` run in both. Each run ends with pytest's closing line. The last line of all has
the same form and counts both runs; the exit status is that of the first run that failed, and a run for which no test
was selected does not count. A run that ends badly although no test failed counts as an error, and is named.

Needs nothing beyond the standard library.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = {"sglang": "sglang or contract", "vllm": "not sglang"}
"""Environment -> markers of the tests that run in it. In this order: most tests are in the last."""

NO_TESTS = 5
"""pytest's exit status where nothing was selected."""

CLOSING = re.compile(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+|no tests ran) in [\d.]+s")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def run(engine: str, markers: str, args: list[str]) -> tuple[int, Counter[str]]:
    """One run of pytest, its output passed on. Returns its exit status and what its closing line counts."""
    python = ROOT / ".venv" / engine / "bin" / "python"
    color = ["--color=yes"] if sys.stdout.isatty() else ["--durations=30", "--durations-min=10"]
    print(f"== tests in .venv/{engine} ({markers})", flush=True)
    closing = ""
    with subprocess.Popen(
        [str(python), "-m", "pytest", "-m", markers, *color, *args], cwd=ROOT, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        tail = b""
        while chunk := os.read(process.stdout.fileno(), 65536):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            tail = (tail + chunk)[-4096:]
    for line in ANSI.sub("", tail.decode(errors="replace")).splitlines():
        if CLOSING.match(line):
            closing = line
    found = counts(closing)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if status not in (0, NO_TESTS) and not found["failed"] and not found["error"]:
        # Neither pytest nor make says it: an interpreter that crashes after its last test.
        print(
            f"== tests in .venv/{engine}: no test failed, but pytest ended with {ending(process.returncode)}",
            flush=True,
        )
        found["error"] += 1
    return status, found


def ending(returncode: int) -> str:
    return f"status {returncode}" if returncode >= 0 else signal.Signals(-returncode).name


def counts(closing: str) -> Counter[str]:
    """`3 passed, 1 error` as numbers; one word for each outcome, whatever its number."""
    found = Counter[str]()
    for number, word in re.findall(r"(\d+) (\w+)", closing.split(" in ", maxsplit=1)[0]):
        found[word.rstrip("s") if word in ("errors", "warnings") else word] += int(number)
    return found


def closing_line(total: Counter[str], seconds: float) -> str:
    """As pytest writes it."""
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error")
    parts = [
        f"{total[word]} {word}{'s' if word in ('warning', 'error') and total[word] != 1 else ''}"
        for word in order
        if total[word] and word != "deselected"
    ]
    text = f" {', '.join(parts) or 'no tests ran'} in {seconds:.2f}s "
    return text.center(80, "=")


def main() -> int:
    began, total, status = time.monotonic(), Counter[str](), 0
    selected = False
    for engine, markers in RUNS.items():
        ended, found = run(engine, markers, sys.argv[1:])
        total += found
        selected |= ended != NO_TESTS
        if ended != NO_TESTS and status == 0:
            status = ended
    print("== both together")
    print(closing_line(total, time.monotonic() - began), flush=True)
    return status if selected else NO_TESTS


if __name__ == "__main__":
    sys.exit(main())
