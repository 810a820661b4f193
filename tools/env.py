"""Build the environment of an engine and print its folder as the last line.

Two layers, because an engine with what it needs takes gigabytes and minutes:

- the base, shared by every checkout of this user: `<cache>/kvlaunch/envs/<engine>-<key>`, with all third-party
  packages from the lock files. The key is a hash of the lock files and of the interpreter, so a base never changes.
- the checkout's own: `.venv/<engine>`, a second, where kvlaunch is installed in editable form. It sees the base's
  packages through a `.pth` file and has the base's commands in its `bin`.

Needs Python 3.11 with venv, and nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from steps import StepError, run_step, say

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
MARKER = "kvlaunch-env.json"
"""Written last: a folder without it is an interrupted build."""

ENGINES = {"vllm": ("vllm-cpu", "dev"), "sglang": ("sglang-cpu", "dev")}
"""Engine -> its lock files. The first one names the base."""


def base_python() -> str:
    """The interpreter behind this one: with an environment activated, this one may lie in what is made anew."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    return base


def base_key(locks: tuple[Path, ...]) -> str:
    """Hash of everything that a base depends on: what is installed, and into which interpreter."""
    digest = hashlib.sha256()
    for lock in locks:
        digest.update(lock.read_bytes())
    digest.update(f"{sys.version}|{sys.base_prefix}|{platform.machine()}".encode())
    return digest.hexdigest()[:12]


def checkout_key(base: Path) -> str:
    """Hash of what the checkout's own environment depends on."""
    digest = hashlib.sha256(f"{base}|{ROOT}".encode())
    for source in (ROOT / "pyproject.toml", ROOT / "kvlaunch" / "__init__.py", Path(__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def envs_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlaunch" / "envs"


@contextlib.contextmanager
def only_builder(path: Path) -> Iterator[None]:
    """Hold the lock file: two builders of one folder come one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"== waiting for another build of {path.with_suffix('').name} to end ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def finished(folder: Path, key: str) -> bool:
    """Whether the folder holds a complete build for this key whose interpreter still exists."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return bool(marker.get("key") == key) and (folder / "bin" / "python").exists()


def finish(folder: Path, key: str) -> None:
    (folder / MARKER).write_text(json.dumps({"key": key, "python": platform.python_version()}) + "\n")


def site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def build_base(folder: Path, key: str, locks: tuple[Path, ...]) -> None:
    """Install the lock files, exactly: pip resolves nothing, so what a lock leaves out stays out."""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    run_step(f"base environment in {folder}", [base_python(), "-m", "venv", folder], log=log)
    count = sum(line[:1].isalnum() for lock in locks for line in lock.read_text().splitlines())
    command: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off"]
    for lock in locks:
        command += ["-r", lock]
    command += shlex.split(os.environ.get("PIP_ARGS", ""))
    say(f"   (some minutes the first time; every checkout shares the result; log: {log})")
    run_step(f"{count} packages from {', '.join(lock.name for lock in locks)}", command, log=log, on_line=PipProgress())
    finish(folder, key)


class PipProgress:
    """Says now and then how far pip is, from the lines that it prints."""

    def __init__(self) -> None:
        self.fetched = 0

    def __call__(self, line: str) -> None:
        if line.startswith(("Collecting ", "Processing ")):
            self.fetched += 1
            if self.fetched % 50 == 0:
                say(f"   {self.fetched} packages fetched")
        elif line.startswith("Installing collected packages"):
            say(f"   {self.fetched} packages fetched, installing")


def build_checkout_env(folder: Path, key: str, base: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    run_step(f"environment in {folder}", [base_python(), "-m", "venv", "--without-pip", folder], log=log)
    # addsitedir and not a bare path: the base's own .pth files must be read too.
    hook = f"import site; site.addsitedir({str(site_packages(base))!r})\n"
    (site_packages(folder) / "_kvlaunch_base.pth").write_text(hook)
    link_commands(base, folder)
    install = ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-input"]
    install += ["--disable-pip-version-check", "--editable", str(ROOT)]
    run_step("kvlaunch, editable", [folder / "bin" / "python", *install], log=log)
    finish(folder, key)


def link_commands(base: Path, folder: Path) -> None:
    """Give the environment the base's commands: binaries as links, Python scripts as copies that run its own Python."""
    python = folder / "bin" / "python"
    for command in sorted((base / "bin").iterdir()):
        target = folder / "bin" / command.name
        if target.exists() or not command.is_file() or command.name.startswith(("python", "activate", "Activate")):
            continue
        content = command.read_bytes()
        if not content.startswith(b"#!"):
            target.symlink_to(command)
            continue
        lines = content.split(b"\n", 3)
        wrapped = lines[0] == b"#!/bin/sh" and lines[1].startswith(b"'''exec'")
        interpreter, body = (lines[1], lines[3]) if wrapped else (lines[0], b"\n".join(lines[1:]))
        if os.fsencode(base / "bin" / "python") not in interpreter:
            continue
        # Through sh, as pip does it for paths that are long or hold a space: a bare #! line can take neither.
        target.write_bytes(b"#!/bin/sh\n'''exec' \"" + os.fsencode(python) + b'" "$0" "$@"\n\' \'\'\'\n' + body)
        target.chmod(target.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


@contextlib.contextmanager
def explained(log: Path) -> Iterator[None]:
    """On a failed step: show the end of its output, and what to do where the cause is a known one."""
    try:
        yield
    except StepError as failure:
        said = [line for line in failure.output.splitlines() if not line.startswith("WARNING:")]
        say("\n".join(said[-30:]))
        say(f"\nThe whole output is in {log}")
        if "No matching distribution found for torch" in failure.output:
            say("pip did not find the CPU build of PyTorch, which lies on PyTorch's own index for CPU builds. Name it:")
            say("    make env PIP_ARGS='--extra-index-url <address of the CPU index>'")
        raise


def make_env(engine: str) -> Path:
    """Build what is missing and return the folder of the checkout's environment.

    Raises:
        StepError: a command failed; the reason has been shown.
    """
    locks = tuple(LOCKS / f"{name}.txt" for name in ENGINES[engine])
    key = base_key(locks)
    base = envs_folder() / f"{locks[0].stem}-{key}"
    if not finished(base, key):
        with only_builder(base.with_suffix(".lock")), explained(base.with_suffix(".log")):
            if not finished(base, key):
                build_base(base, key, locks)
    folder = ROOT / ".venv" / engine
    own_key = checkout_key(base)
    with only_builder(folder.with_suffix(".lock")), explained(folder.with_suffix(".log")):
        if not finished(folder, own_key):
            build_checkout_env(folder, own_key, base)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="?", default="vllm")
    engine = parser.parse_args().engine
    if engine not in ENGINES:
        say(f"make env: there is no engine {engine!r}; supported: {', '.join(ENGINES)}")
        return 2
    if sys.version_info[:2] != (3, 11):
        say(
            f"make env: the lock files are for Python 3.11, and this is {platform.python_version()} ({sys.executable})."
        )
        say("Name another interpreter: make env PYTHON=/path/to/python3.11")
        return 2
    try:
        folder = make_env(engine)
    except StepError:
        return 1
    except KeyboardInterrupt:
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
