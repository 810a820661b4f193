"""What the tests of launching share: plans made by hand, a launcher in its own process, a look at what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvlaunch.launch.paths import RunPaths
from kvlaunch.launch.ports import hold_port, port_of
from kvlaunch.launch.procfs import read_process
from kvlaunch.launch.state import StateRecord, load_state
from kvlaunch.plan.types import (
    KVMode,
    KVPlan,
    LaunchPlan,
    ModelPlan,
    NodePlan,
    RankPlan,
    RendezvousPlan,
    ServerPlan,
    StagePlan,
    TimeoutPlan,
)

_ENV = {"FAKE": "from the plan"}
FAKE_ENGINE = Path(__file__).resolve().parents[1] / "fake_engine.py"

_LAUNCH = """
import sys
from pathlib import Path
from kvlaunch.cli.up import execute
from kvlaunch.errors import EngineError, KVLaunchError
from kvlaunch.plan.types import LaunchPlan
flags = sys.argv[2:]
try:
    code = execute(LaunchPlan.load(Path(sys.argv[1])), detach="detach" in flags, json_output="json" in flags,
                   verbose="verbose" in flags)
except KVLaunchError as exc:
    print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
    if isinstance(exc, EngineError):
        print(f"rank={exc.rank} log={exc.log_path}\\n{exc.log_tail}", file=sys.stderr)
    code = exc.exit_code
sys.exit(code)
"""

_VERB = """
import sys
from kvlaunch.cli import logs, ps, stop
from kvlaunch.errors import KVLaunchError
try:
    code = eval(sys.argv[1])
except KVLaunchError as exc:
    print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
    code = exc.exit_code
sys.exit(code)
"""


def wait_until(condition: Callable[[], object], within_s: float, what: str) -> None:
    """Poll until the condition holds; fail with `what` where it does not within so many seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.zombie


class Launched:
    """A launcher that runs."""

    def __init__(self, process: subprocess.Popen[str], paths: RunPaths) -> None:
        self.process = process
        self.paths = paths

    @property
    def state(self) -> StateRecord | None:
        return load_state(self.paths)

    def pids(self) -> set[int]:
        """The engine and its ranks, of all epochs."""
        try:
            return {int(line) for line in (self.paths.root / "fake.pids").read_text().split()}
        except FileNotFoundError:
            return set()

    def wait_for(self, state: str, within_s: float = 40) -> None:
        def reached() -> bool:
            record = self.state
            if self.process.poll() is not None and (record is None or record.state.value != state):
                raise AssertionError(f"the launcher ended: {self.process.communicate()}")
            return record is not None and record.state.value == state

        wait_until(reached, within_s, f"state {state}")

    def wait_for_ranks(self, count: int, within_s: float = 40) -> None:
        wait_until(lambda: len(self.pids()) >= count, within_s, f"{count} processes")

    def wait_gone(self, within_s: float) -> None:
        wait_until(lambda: not any(alive(pid) for pid in self.pids()), within_s, f"alive still: {sorted(self.pids())}")

    def end(self, within_s: float = 40) -> tuple[int, str, str]:
        """Wait for the launcher's end: exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, err


class Kit:
    """Makes plans and launches them, in a runtime folder of its own."""

    def __init__(self, runtime: Path, scratch: Path) -> None:
        self.runtime = runtime
        self.scratch = scratch
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "UNWANTED": "1"}
        self._launched: list[Launched] = []
        self._held: list[socket.socket] = []
        self._count = 0
        self.command: Callable[..., list[str]] = lambda *words: list(words)
        """Makes of a command the one that runs it where this kit's launchers are to run."""

    def plan(self, *flags: str, tp: int = 2, pp: int = 2, port: int | None = None, **changes: Any) -> LaunchPlan:
        """A plan of the fake engine; `changes` replace fields of LaunchPlan, of its timeouts or of its rendezvous."""
        self._count += 1
        run = changes.pop("run", f"t{self._count}-{os.getpid()}")
        if port is None:
            self._held.append(hold_port("127.0.0.1"))
            port = port_of(self._held[-1])
        mode = changes.pop("mode", "static")
        world = tp * pp
        argv = (sys.executable, str(FAKE_ENGINE), "--port", str(port), "--world", str(world), *flags)
        timeouts = {"ready_s": 30.0, "drain_s": 1.0, "term_s": 2.0}
        timeouts.update({key: changes.pop(key) for key in list(changes) if key in timeouts})
        rdzv = {"backend": "c10d", "endpoint": "localhost:0", "id": run, "timeout_s": 20.0}
        rdzv.update({key: changes.pop(key) for key in list(changes) if key in ("endpoint", "timeout_s")})
        fields: dict[str, Any] = {
            "run": run,
            "name": "fake",
            "engine": "vllm",
            "engine_python": sys.executable,
            "model": ModelPlan(
                name="fake", path="fake", architecture="F", num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16"
            ),
            "device": "cpu",
            "tp_size": tp,
            "pp_size": pp,
            "nnodes": 1,
            "world_size": world,
            "ranks": tuple(_rank(rank, tp) for rank in range(world)),
            "stages": tuple(
                StagePlan(
                    pp_rank=stage,
                    leader=stage * tp,
                    ranks=tuple(range(stage * tp, stage * tp + tp)),
                    node_rank=0,
                    endpoint=f"ipc://{self.paths(run).listener_socket(stage)}",
                )
                for stage in range(pp)
            ),
            "nodes": (NodePlan(node_rank=0, ranks=tuple(range(world)), argv=argv, env=_ENV, unset=("UNWANTED",)),),
            "kv": _kv(mode),
            "server": ServerPlan(host="127.0.0.1", port=port),
            "rdzv": RendezvousPlan(**rdzv),
            "max_restarts": 0,
            "timeouts": TimeoutPlan(**timeouts),
            "notes": (),
        }
        return LaunchPlan(**{**fields, **changes})

    def launch(self, plan: LaunchPlan, *flags: str) -> Launched:
        file = self.scratch / f"{plan.run}.json"
        file.write_bytes(plan.to_json())
        process = subprocess.Popen(
            self.command(sys.executable, "-c", _LAUNCH, str(file), *flags),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        launched = Launched(process, self.paths(plan.run))
        self._launched.append(launched)
        return launched

    def paths(self, run: str) -> RunPaths:
        return RunPaths(self.runtime / "kvlaunch" / run)

    def verb(self, expression: str, within_s: float = 30) -> tuple[int, str, str]:
        """Run one of the verbs, as in `ps.run(json_output=True)`: exit code, stdout, stderr."""
        done = subprocess.run(
            [sys.executable, "-c", _VERB, expression],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def close(self) -> None:
        """End whatever a failed test has left."""
        for held in self._held:
            held.close()
        for launched in self._launched:
            record = launched.state
            pids = {*launched.pids(), *([record.owner[0]] if record else [])}
            for pid in pids:
                if alive(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if launched.process.poll() is None:
                launched.process.kill()
            launched.process.communicate()


def _rank(rank: int, tp: int) -> RankPlan:
    return RankPlan(
        global_rank=rank,
        pp_rank=rank // tp,
        tp_rank=rank % tp,
        node_rank=0,
        local_rank=rank,
        device="cpu",
        layers=(0, 1),
        weight_bytes=1,
        kv_bytes_per_token=1,
        kv_bytes_per_block=16,
    )


def _kv(mode: KVMode) -> KVPlan:
    return KVPlan(
        mode=mode,
        block_size=16,
        num_blocks=8,
        blocks_per_page=1,
        granularity=4096,
        reserve_bytes=1,
        guard=True,
        ahead_low=1,
        ahead_high=2,
        cache_keep_bytes=0,
        cache_idle_s=1.0,
        commit_timeout_s=1.0,
    )


@contextlib.contextmanager
def awkward_kit() -> Iterator[Kit]:
    """A kit whose runtime folder has a name with spaces, quotes and a newline; short, since sockets lie in it."""
    with (
        tempfile.TemporaryDirectory(prefix="k '\"\n", dir="/tmp") as runtime,
        tempfile.TemporaryDirectory(prefix="kvlaunch-test-", dir="/tmp") as scratch,
    ):
        kit = Kit(Path(runtime), Path(scratch))
        try:
            yield kit
        finally:
            kit.close()
