"""Refresh lock files: resolve `locks/<name>.in` with pip and write every version to `locks/<name>.txt`.

    python tools/lock.py            all of them
    python tools/lock.py dev        this one

pip resolves without installing (`--dry-run --report`). A file may name others to stay in step with (`-c other.txt`):
what is pinned there is left out of it. `# leave out: NAME...` drops packages that the resolver brings in and that must
not be installed. `# without dependencies: NAME==VERSION...` adds packages that pip does not get to see, because what
they ask for cannot be had or is not wanted. Needs nothing beyond the standard library and a pip of version 23 or newer.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from steps import StepError, run_step, say

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
ORDER = ("vllm-cpu", "dev", "sglang-cpu")
"""A file comes after those that it stays in step with."""


def canonical(name: str) -> str:
    """A distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """Canonical name -> line of a lock file."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return {canonical(line.split("==")[0]): line for line in lines if line and not line.startswith("#")}


def noted(text: str, what: str) -> list[str]:
    """The words of all comments `# what: WORD...`."""
    return [word for line in re.findall(rf"^# {what}: (.*)$", text, re.M) for word in line.split()]


def own_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def resolve(name: str, python: Path) -> None:
    """Write locks/<name>.txt.

    Raises:
        StepError: pip found no set of versions that fits.
    """
    source = LOCKS / f"{name}.in"
    text = source.read_text()
    left_out = {canonical(word) for word in noted(text, "leave out")}
    added = noted(text, "without dependencies")
    elsewhere: dict[str, str] = {}
    for other in re.findall(r"^-c (\S+)", text, re.M):
        elsewhere |= pins(LOCKS / other)
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.json"
        command: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-input",
            "--quiet",
        ]
        command += ["--disable-pip-version-check", "--report", report, "-r", source, *own_dependencies()]
        run_step(f"resolve {source.name}", [*command, *shlex.split(os.environ.get("PIP_ARGS", ""))])
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    lines = {
        canonical(item["name"]): f"{item['name']}=={item['version']}"
        for item in found
        if canonical(item["name"]) not in left_out | elsewhere.keys()
    }
    lines |= {canonical(line.split("==")[0]): line for line in added}
    head = f"# Written by `make lock` from {source.name}. Installed with --no-deps: this is the exact list.\n"
    target = LOCKS / f"{name}.txt"
    before = pins(target) if target.exists() else {}
    target.write_text(head + "".join(f"{lines[key]}\n" for key in sorted(lines)))
    changed = {key for key in lines.keys() | before.keys() if lines.get(key) != before.get(key)}
    say(f"   {target.name}: {len(lines)} packages, {len(changed)} changed")


def main() -> int:
    names = sys.argv[1:] or list(ORDER)
    if unknown := [name for name in names if name not in ORDER]:
        say(f"make lock: no such lock file: {', '.join(unknown)}; there are: {', '.join(ORDER)}")
        return 2
    with tempfile.TemporaryDirectory() as tmp:
        # An environment of its own: the resolver must not be led by what happens to be installed.
        venv.create(tmp, with_pip=True)
        for name in names:
            try:
                resolve(name, Path(tmp) / "bin" / "python")
            except StepError as failure:
                say("\n".join(failure.output.splitlines()[-30:]))
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
