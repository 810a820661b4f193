"""Every path of a run is made here.

A run's folder is `$XDG_RUNTIME_DIR/kvlaunch/<run>/`, or `/tmp/kvlaunch-<uid>/<run>/` (both 0700) where the variable
is not set. It does not depend on TMPDIR: a unix socket's path may have 107 bytes at most.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlaunch.errors import ConfigError

SOCKET_PATH_LIMIT = 107
"""Bytes of sun_path on Linux, without the closing NUL (unix(7))."""


def runs_root() -> Path:
    """The folder that holds the run folders of this user. Nothing is created."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir() and len(os.fsencode(base)) <= 40:
        return Path(base) / "kvlaunch"
    return Path(f"/tmp/kvlaunch-{os.getuid()}")


def _is_private(path: Path) -> bool:
    try:
        st = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(st.st_mode) and st.st_uid == os.getuid() and not st.st_mode & 0o077


def _private_dir(path: Path) -> None:
    """Create path with mode 0700, or check that it is ours alone.

    Raises:
        ConfigError: it is a link, another user's, or open to others.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=False)
    if not _is_private(path):
        raise ConfigError(
            f"{path} must be a folder of your own that nobody else can enter (mode 0700), and it is not.",
            hint=f"Remove it or mend it: chmod 700 {path}; or point XDG_RUNTIME_DIR to a private folder.",
        )


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one run."""

    root: Path

    @classmethod
    def of(cls, run: str) -> RunPaths:
        return cls(runs_root() / run)

    @property
    def run(self) -> str:
        return self.root.name

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def events(self) -> Path:
        """One JSON object a line, appended by every process of the run."""
        return self.root / "events.jsonl"

    @property
    def kv_stats(self) -> Path:
        """KVStats of the scheduler as JSON, written whenever it has become idle."""
        return self.root / "stats.json"

    @property
    def agent(self) -> Path:
        """What this node's agent writes down of itself."""
        return self.root / "agent.json"

    @property
    def secret(self) -> Path:
        """The run's secret, where it has one: for the engine's processes and for other commands of this user."""
        return self.root / "secret"

    @property
    def listeners(self) -> Path:
        """Where KV requests are served, in a run on several nodes. Written by the agent."""
        return self.root / "listeners.json"

    @property
    def death(self) -> Path:
        """Which rank's process of this node ended first. Written by the launcher."""
        return self.root / "death.json"

    def served_at(self, role: str) -> Path:
        """Where one who serves KV requests on this node is reached from others, which it writes itself."""
        return self.root / f"kv-{role.replace(' ', '')}"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def engine_log(self) -> Path:
        return self.logs / "engine.log"

    @property
    def agent_log(self) -> Path:
        """Output of this node's agent and of the launcher in the background."""
        return self.logs / "agent.log"

    def rank_log(self, global_rank: int) -> Path:
        return self.logs / f"rank{global_rank}.log"

    def failure(self, who: str) -> Path:
        """JSON record of the first exception in one process (`rank3`, `scheduler`)."""
        return self.root / "failures" / f"{who}.json"

    def listener_socket(self, pp_rank: int) -> Path:
        """Socket of the stage's StageListener (ZeroMQ)."""
        return self.root / f"kv-s{pp_rank}"

    def peer_socket(self, pp_rank: int) -> Path:
        """Socket on which the stage leader accepts its peers (SOCK_SEQPACKET)."""
        return self.root / f"kv-p{pp_rank}"

    def create(self) -> None:
        """Make the folder and its sub-folders, 0700."""
        if not self.root.parent.parent.is_dir():
            raise ConfigError(f"{self.root.parent.parent} does not exist: no place for the files of a run.")
        _private_dir(self.root.parent)
        _private_dir(self.root)
        for sub in (self.logs, self.root / "failures"):
            _private_dir(sub)


def all_runs() -> Iterator[RunPaths]:
    """Every run folder of this user, live or dead, oldest first."""
    root = runs_root()
    if not _is_private(root):  # files in another user's folder are not to be believed
        return
    found = []
    for path in root.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append(((path / "plan.json").stat().st_mtime_ns, path))
    for _, path in sorted(found):
        yield RunPaths(path)
