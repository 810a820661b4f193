"""Run a named command quietly: one line says what it does, one how it ended and how long it took.

    python tools/steps.py "ruff check" -- ruff check .

The command's output is shown only where it fails. Progress goes to standard error, so that a script which prints a
result (tools/env.py) keeps standard output for it. Needs nothing beyond the standard library.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class StepError(Exception):
    """A step's command ended with an exit status other than 0.

    Args:
        status: that exit status; negative for a signal.
        output: what the command printed, both streams together.
    """

    def __init__(self, title: str, status: int, output: str) -> None:
        super().__init__(f"{title}: exit status {status}")
        self.status = status
        self.output = output


def run_step(
    title: str,
    command: Sequence[str | Path],
    *,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run command and return what it printed.

    Args:
        log: file that the output is written to as it comes.
        on_line: called with each line of output.

    Raises:
        StepError: its exit status was not 0. Nothing has been shown of its output.
    """
    say(f"== {title} ...")
    began = time.monotonic()
    lines: list[str] = []
    with (
        open(log or "/dev/null", "a", encoding="utf-8") as sink,
        subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(env) if env is not None else None,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            sink.write(line)
            sink.flush()
            if on_line is not None:
                on_line(line)
    took = time.monotonic() - began
    output = "".join(lines)
    if process.returncode != 0:
        say(f"== {title}: FAILED after {took:.1f} s (exit status {process.returncode})")
        raise StepError(title, process.returncode, output)
    say(f"== {title}: ok, {took:.1f} s")
    return output


def main(argv: Sequence[str]) -> int:
    if len(argv) < 3 or argv[1] != "--":
        say("usage: steps.py TITLE -- COMMAND...")
        return 2
    try:
        run_step(argv[0], argv[2:])
    except StepError as failure:
        say(failure.output.rstrip())
        return failure.status if failure.status > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
