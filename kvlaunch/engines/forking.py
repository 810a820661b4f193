"""An engine's processes forked from one that has imported the engine, in place of each importing it anew.

The API process starts one fork server, which imports what every process of the engine needs while the API process does
the same. The engine's other processes are forked from it. It registers no plugin, runs no second thread and enters no
parallel region, so a child of it is what a fresh interpreter is after the same imports. Where a process must be a fresh
one, or the fork server is not what it should be, it is spawned as the engine does it by itself.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from typing import Any

from kvlaunch.launch.linux import set_parent_death_signal
from kvlaunch.launch.state import write_atomically

log = logging.getLogger("kvlaunch.forking")

AT_LOAD = ("LD_PRELOAD", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_")
"""Prefixes of variables that are read once, when a program or a library is loaded."""
THREADS = "OMP_NUM_THREADS"
"""The one of them that can be applied later."""

PRELOAD_TIMEOUT_S = 120.0
"""The fork server imports what the API process has just imported; a slow machine gets two minutes."""


class _Server:
    """The fork server as seen from a process that may ask it for children: the API process, and its children."""

    def __init__(self, told: Path) -> None:
        self.told = told
        """Written by the fork server when it is ready: how many threads it has."""
        self.environ = _at_load()
        self.usable: bool | None = None

    def serves(self) -> bool:
        """Whether the process to be started may be forked. The first call waits for the fork server."""
        if self.usable is None:
            self.usable = self._wait()
        return self.usable and _at_load() == self.environ

    def _wait(self) -> bool:
        deadline = time.monotonic() + PRELOAD_TIMEOUT_S
        while not self.told.exists():
            if not self._alive() or time.monotonic() > deadline:
                log.warning("the fork server did not come up: the engine's processes are spawned, which takes longer")
                return False
            time.sleep(0.01)
        threads = int(self.told.read_text())
        if threads > 1:
            log.warning(
                "the fork server has %d threads: the engine's processes are spawned, which takes longer", threads
            )
        return threads == 1

    @staticmethod
    def _alive() -> bool:
        pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


_here: list[_Server] = []
"""The fork server of this process, if there is one."""


def start(folder: Path, module: str) -> None:
    """Start the fork server. To be called from the main thread: the fork server ends with it.

    Args:
        folder: for its socket and its note. The path must be short enough for a socket.
        module: name of a module that calls `preload` when it is imported; nothing else may import it.
    """
    server = _Server(folder / "forkserver")
    server.told.unlink(missing_ok=True)  # by the engine before a restart
    # Where multiprocessing puts its sockets. TMPDIR may be too long for one, and nobody sweeps it after a kill.
    current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    os.environ[_NOTE] = str(server.told)
    threads = os.environ.get(THREADS)
    os.environ[THREADS] = "1"
    try:
        multiprocessing.set_forkserver_preload([module])
        forkserver.ensure_running()
    finally:
        del os.environ[_NOTE], os.environ[THREADS]
        if threads is not None:
            os.environ[THREADS] = threads
    _here.append(server)


def preload(modules: Sequence[str]) -> None:
    """In the fork server: import these modules, and become ready."""
    import setproctitle

    parent = os.getppid()
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the signal was set
        os._exit(1)
    server = _Server(Path(os.environ.pop(_NOTE)))
    # First: it finds the title only while the environment is where the kernel has put it.
    setproctitle.setproctitle("kvlaunch::ForkServer")
    for name in modules:
        importlib.import_module(name)
    # The children ask this same fork server for children of their own; multiprocessing would start another.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()  # collections in the children leave these objects' pages shared
    threads = len(list(Path("/proc/self/task").iterdir()))
    server.usable = threads == 1
    _here.append(server)
    write_atomically(server.told, str(threads).encode())


def context() -> Any:
    """A multiprocessing context that forks from the fork server, or None in a process without one."""
    return _Context() if _here else None


class _Process(BaseProcess):
    _start_method = "forkserver"
    _environ: dict[str, str] | None = None

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  (multiprocessing's name)
        if not _here or not _here[0].serves():
            return popen_spawn_posix.Popen(process_obj)
        process_obj._environ = dict(os.environ)
        return popen_forkserver.Popen(process_obj)

    def run(self) -> None:
        if self._environ is not None:
            self._take_environ(self._environ)
        super().run()

    @staticmethod
    def _take_environ(environ: dict[str, str]) -> None:
        """A spawned process has the environment of its parent; the fork server has the one of its own start."""
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        if int(environ.get(THREADS, "1")) > 1:
            import torch

            torch.set_num_threads(int(environ[THREADS]))


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Nothing: an engine that chooses for all of its process gets this context all the same."""


_NOTE = "KVLAUNCH_FORKSERVER"


def _at_load() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(AT_LOAD) and name != THREADS}
