"""A stand-in for an engine in tests of supervision: an HTTP server with child processes that play the ranks.

    python fake_engine.py --port 8000 --world 4 [switches]

It takes part in a run as an engine with kvlaunch's plugin would: ranks emit `weights` and `kv` and record failures.
Every process notes its id in `fake.pids` of the run folder, so that tests can see whether all are gone.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvlaunch.env import read_run_env
from kvlaunch.events import emit
from kvlaunch.launch.failure import record_failure
from kvlaunch.launch.tether import tether


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--first-rank", type=int, default=0, help="the first of its --world ranks")
    parser.add_argument("--rank", type=int, default=None, help="play this rank")
    parser.add_argument("--epoch", type=int, default=0, help="for a rank: the engine's")
    parser.add_argument("--ignore-term", action="store_true", help="SIGTERM is ignored by every process")
    parser.add_argument("--tether", action="store_true", help="ranks tie themselves to the launcher")
    parser.add_argument("--detach-ranks", action="store_true", help="ranks leave the engine's session")
    parser.add_argument("--clear-environ", action="store_true", help="ranks are started without kvlaunch's variables")
    parser.add_argument("--fail-rank", type=int, default=None, help="this rank raises in start-up")
    parser.add_argument("--fail-epochs", type=int, default=10**6, help="... in the first so many epochs only")
    parser.add_argument(
        "--stay-after-failure", action="store_true", help="the engine does not end though a rank failed"
    )
    parser.add_argument("--dead-generation", action="store_true", help="/v1/models answers, completions do not")
    parser.add_argument("--never-serve", action="store_true", help="the port is never opened")
    parser.add_argument("--exit-code", type=int, default=None, help="end at once with this status")
    parser.add_argument("--in-work", type=int, default=0, help="what /metrics says of running requests")
    parser.add_argument("--kv", action="store_true", help="ranks hold KV memory (pretended) and answer for it")
    parser.add_argument("--no-kv-rank", type=int, default=None, help="... but this one stays away")
    parser.add_argument("--shm", default=None, help="each rank makes a shared memory file of this name and its rank")
    parser.add_argument("--die-after", type=float, default=None, help="... and kills itself so many seconds later")
    return parser.parse_args()


def note_pid(run_dir: Path) -> None:
    with (run_dir / "fake.pids").open("a") as f:
        f.write(f"{os.getpid()}\n")


def up_file(run_dir: Path, epoch: int, rank: int) -> Path:
    return run_dir / f"fake.up-{epoch}-{rank}"


def play_rank(args: argparse.Namespace, run_dir: Path) -> None:
    epoch = args.epoch
    log = run_dir / "logs" / f"rank{args.rank}.log"
    with log.open("a") as f:
        f.write(f"rank {args.rank} starts, epoch {epoch}\n")
    if args.rank == args.fail_rank and epoch < args.fail_epochs:
        exc = RuntimeError(f"boom on rank {args.rank}")
        with log.open("a") as f:
            f.write(f"RuntimeError: {exc}\n")
        record_failure(run_dir, f"rank{args.rank}", args.rank, exc, log)
        sys.exit(1)
    keep = None
    if args.shm:
        with open(f"/dev/shm/{args.shm}{args.rank}", "w+b") as shm:
            shm.truncate(4096)
            keep = mmap.mmap(shm.fileno(), 4096)
        if args.die_after is not None:
            time.sleep(args.die_after)
            os.kill(os.getpid(), signal.SIGKILL)
    emit(run_dir / "events.jsonl", "weights", rank=args.rank)
    if args.kv and args.rank != args.no_kv_rank:
        start_kv(args.rank, run_dir, epoch)
    emit(run_dir / "events.jsonl", "kv", rank=args.rank)
    up_file(run_dir, epoch, args.rank).touch()
    while True:
        signal.pause()
    del keep


def start_kv(rank: int, run_dir: Path, epoch: int) -> None:
    from kvlaunch.kv.geometry import BlockGeometry
    from kvlaunch.kv.ipc.listener import StageListener
    from kvlaunch.kv.ipc.peer import FarPeer, StagePeer
    from kvlaunch.kv.ipc.roles import rank_role, stage_role
    from kvlaunch.kv.memory.noop import NoopBackend
    from kvlaunch.kv.rank import RankMemory
    from kvlaunch.launch import listeners
    from kvlaunch.launch.paths import RunPaths
    from kvlaunch.plan.address import joined_endpoint
    from kvlaunch.plan.types import LaunchPlan
    from kvlaunch.secret import load_secret

    def serves(role: str, endpoint: str) -> None:
        listeners.save(paths.served_at(role), listeners.Listeners(epoch=epoch, endpoints={role: endpoint}))

    env = read_run_env()
    paths = RunPaths(run_dir)
    plan = LaunchPlan.load(paths.plan)
    me = plan.ranks[rank]
    stage = plan.stages[me.pp_rank]
    geometry = BlockGeometry.from_strips([(0, 4096)], num_blocks=8, blocks_per_page=1, granularity=4096)
    memory = RankMemory(
        NoopBackend().reserve(8 * 4096),
        geometry,
        global_rank=rank,
        pp_rank=me.pp_rank,
        tp_rank=me.tp_rank,
        run=plan.run,
        epoch=epoch,
    )
    peer_path = paths.peer_socket(me.pp_rank)
    any_port = f"tcp://{joined_endpoint(env.local_addr, 0)}" if env is not None else ""
    if rank == stage.leader:
        listener = StageListener(
            memory,
            endpoint=stage.endpoint,
            peer_path=peer_path,
            peers=[r for r in stage.ranks if r != rank],
            peer_timeout_s=plan.kv.commit_timeout_s / 2,
            network=any_port if stage.network else None,
            secret=load_secret(paths.secret, {}) if stage.network else None,
        )
        listener.start()
        if listener.network_endpoint is not None:
            serves(stage_role(me.pp_rank), listener.network_endpoint)
        for other, endpoint in listeners.far_ranks(paths, plan, stage, epoch, timeout_s=60).items():
            listener.reach(other, endpoint)
    elif me.node_rank != stage.node_rank:
        peer = FarPeer(memory, endpoint=any_port, secret=load_secret(paths.secret, {}))
        peer.start()
        serves(rank_role(rank), peer.endpoint)
    else:
        StagePeer(memory, peer_path=peer_path).start()


def start_ranks(args: argparse.Namespace, run_dir: Path, epoch: int) -> list[subprocess.Popen[bytes]]:
    environ = dict(os.environ)
    flags = sys.argv[1:]
    if args.clear_environ:
        environ = {k: v for k, v in environ.items() if not k.startswith("KVLAUNCH")}
        environ["FAKE_RUN_DIR"] = str(run_dir)
    return [
        subprocess.Popen(
            [sys.executable, __file__, *flags, "--rank", str(rank), "--epoch", str(epoch)],
            env=environ,
            start_new_session=args.detach_ranks,
        )
        for rank in ranks_of(args)
    ]


def ranks_of(args: argparse.Namespace) -> range:
    return range(args.first_rank, args.first_rank + args.world)


def serve(args: argparse.Namespace) -> None:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: object) -> None:
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(200, f'vllm:num_requests_running{{engine="0"}} {args.in_work}.0\n')
            elif self.path in ("/health", "/v1/models"):
                self.answer(200, {"data": [{"id": "fake"}]})
            else:
                self.answer(404, {})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if args.dead_generation:
                time.sleep(3600)
            self.answer(200, {"choices": [{"text": "x"}]})

        def log_message(self, *what: object) -> None:
            print(*what, flush=True)

    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    args = options()
    env = read_run_env()
    run_dir = env.run_dir if env else Path(os.environ["FAKE_RUN_DIR"])
    if args.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_pid(run_dir)
    if args.rank is not None:
        if args.tether and env:
            tether(env.launcher_pid)
        play_rank(args, run_dir)
    epoch = env.epoch if env else 0
    print(f"fake engine starts, epoch {epoch}", flush=True)
    (run_dir / "fake.env").write_text(json.dumps(dict(os.environ)))
    if args.exit_code is not None:
        print("fake engine gives up", flush=True)
        sys.exit(args.exit_code)
    ranks = start_ranks(args, run_dir, epoch)
    if not args.ignore_term:
        signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks] and sys.exit(0))
    serving = args.never_serve
    while True:
        up = [up_file(run_dir, epoch, rank).exists() for rank in ranks_of(args)]
        if not serving and (all(up) or args.dead_generation):
            serve(args)
            serving = True
        for rank in ranks:
            if rank.poll() is not None and not args.stay_after_failure:
                print(f"a rank ended with {rank.returncode}", flush=True)
                for other in ranks:
                    other.kill()
                sys.exit(1)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
