"""The sbatch script: what it asks for, that bash takes it, and what it does on a cluster of stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlaunch.errors import ConfigError, PlanError
from kvlaunch.launch.cluster_env import recognise
from kvlaunch.render.job import Job
from kvlaunch.render.slurm import SlurmOptions, render
from tests.unit.render_jobs import AWKWARD, LARGE, TINY, TWO, job

GIB = 1 << 30
SCRIPTS = {
    "two nodes": (*LARGE, TWO),
    "one node": LARGE,
    "cpu": (*TINY, "pp=2", TWO),
    "static": (*TINY, "pp=2", TWO, "kv=static"),
    "awkward": (*TINY, "pp=2", TWO, *AWKWARD),
    "own endpoint": (*LARGE, TWO, "rdzv.endpoint=10.0.0.1:29500", "rdzv.id=mine", "rdzv.secret_file=/home/me/secret"),
}


def script(*overrides: str, **options: Any) -> str:
    return render(job(*overrides), SlurmOptions(**options))


def directives(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines()[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            assert name not in found
            found[name] = value
    return found


def test_what_is_asked_of_slurm() -> None:
    asked = directives(script(*LARGE, TWO, time="8:00:00", partition="gpu", account="us", more=("--qos=high", "x=1")))
    assert asked == {
        "job-name": "Qwen3-8B",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "10",
        "gpus-per-node": "2",
        "mem": asked["mem"],
        "output": "%x-%j.log",
        "time": "8:00:00",
        "partition": "gpu",
        "account": "us",
        "signal": "TERM@22",
        "qos": "high",
        "x": "1",
    }


def test_memory_of_a_node_is_that_of_the_plan() -> None:
    made = job(*TINY, "tp=2", "pp=2", TWO, "kv.reserve=3GiB")
    ranks = made.plan.ranks[:2]
    needed = sum(rank.weight_bytes + made.plan.kv.num_blocks * rank.kv_bytes_per_block for rank in ranks)
    assert needed > 5 * GIB
    # 4 GiB a rank beside that, 4 GiB for the node's other processes, 2 GiB of shared memory; whole GiB.
    assert made.memory_bytes == (-(-needed // GIB) + 4 * 2 + 4 + 2) * GIB
    assert directives(render(made, SlurmOptions()))["mem"] == f"{made.memory_bytes >> 20}M"
    assert made.cpus == 2 + 8 * 2
    assert "gpus-per-node" not in directives(render(made, SlurmOptions()))


def test_the_user_knows_better_what_a_node_has() -> None:
    made = job(*LARGE, cpus=96, memory_bytes=10**9)
    asked = directives(render(made, SlurmOptions()))
    assert (asked["cpus-per-task"], asked["mem"]) == ("96", "954M")
    assert "--cpus-per-task=96 " in render(made, SlurmOptions())


def test_time_to_end_is_that_of_the_plan() -> None:
    assert directives(script(*LARGE, "timeouts.drain_s=60.5", "timeouts.term_s=20"))["signal"] == "TERM@88"


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_takes_it(name: str) -> None:
    text = script(*SCRIPTS[name], before=("module load cuda", "source 'my venv/bin/activate'"))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_takes_it(name: str) -> None:
    # SC2016 wonders about a $ in single quotes: an override's own.
    command = [Path(sys.executable).parent / "shellcheck", "--exclude=SC2016", "-"]
    done = subprocess.run(
        command, input=script(*SCRIPTS[name]), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames gpu[01-02]" ] || exit 3
echo gpu01; echo gpu02
i=0; while [ $i -lt 20000 ]; do echo more; i=$((i + 1)); done
"""
"""A list longer than a pipe holds: a reader that goes away early would be noticed."""

SRUN = """#!/usr/bin/env python3
import json, os, subprocess, sys
words = sys.argv[1:]
at = next(i for i, word in enumerate(words) if not word.startswith("-"))
with open(os.environ["SEEN"] + ".srun", "w") as f:
    json.dump(words[:at], f)
for rank in range(2):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": str(rank),
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"]}
    code = subprocess.run(words[at:], env={**os.environ, **step}).returncode
    if code:
        sys.exit(code)
"""

KVLAUNCH = """#!/usr/bin/env python3
import json, os, sys
if sys.argv[1:] == ["secret", "new"]:
    print("s3cret" * 8)
    sys.exit(0)
with open(f"{os.environ['SEEN']}.{os.environ['SLURM_NODEID']}", "w") as f:
    json.dump({"argv": sys.argv, "env": dict(os.environ)}, f)
sys.exit(int(os.environ.get("FAILS", "0")))
"""


class Cluster:
    """Stand-ins for SLURM's commands and for kvlaunch, and what they saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, "kvlaunch": KVLAUNCH}.items():
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def submit(self, text: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = self.folder / "job.sh"
        path.write_text(text)
        full = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "SEEN": str(self.folder / "seen"),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "gpu[01-02]",
            "SLURM_NODEID": "0",
            **env,
        }
        return subprocess.run(["bash", str(path)], env=full, capture_output=True, text=True, timeout=60, check=False)

    def seen(self, what: str) -> Any:
        return json.loads((self.folder / f"seen.{what}").read_text())


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_every_node_gets_the_same_words(cluster: Cluster) -> None:
    overrides = (*TINY, "pp=2", TWO, *AWKWARD)
    done = cluster.submit(script(*overrides))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    nodes = [cluster.seen(str(rank)) for rank in range(2)]
    expected = ["up", *overrides, "rdzv.endpoint=gpu01:23456", "rdzv.id=slurm-123456"]
    assert [node["argv"][1:] for node in nodes] == [expected, expected]
    assert cluster.seen("srun") == [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=10",
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--label",
    ]


def test_the_nodes_recognise_what_the_script_says(cluster: Cluster) -> None:
    cluster.submit(script(*LARGE, TWO))
    for rank in range(2):
        node = cluster.seen(str(rank))
        found = recognise(node["env"])
        assert found is not None
        words = dict(word.split("=", 1) for word in node["argv"][2:])
        assert found.defaults({})["node_rank"] == rank
        assert {key: words[key] for key in ("rdzv.endpoint", "rdzv.id")} == {
            key: found.settings[key].value for key in ("rdzv.endpoint", "rdzv.id")
        }
        assert int(words["nnodes"]) == found.nnodes


def test_the_secret_is_in_the_environment_alone(cluster: Cluster) -> None:
    text = script(*LARGE, TWO)
    done = cluster.submit(text)
    nodes = [cluster.seen(str(rank)) for rank in range(2)]
    assert [node["env"]["KVLAUNCH_SECRET"] for node in nodes] == ["s3cret" * 8] * 2
    assert not any("s3cret" in word for node in nodes for word in node["argv"])
    assert "s3cret" not in done.stdout + done.stderr + text
    assert "s3cret" not in " ".join(cluster.seen("srun"))
    assert not [
        path for path in cluster.folder.iterdir() if path.name not in ("bin", "job.sh") and "seen" not in path.name
    ]


def test_a_secret_of_the_users_own_is_kept(cluster: Cluster) -> None:
    cluster.submit(script(*LARGE, TWO), KVLAUNCH_SECRET="mine" * 10)
    assert cluster.seen("1")["env"]["KVLAUNCH_SECRET"] == "mine" * 10


@pytest.mark.parametrize("name", ["one node", "static", "own endpoint"])
def test_no_secret_where_none_is_needed(name: str, cluster: Cluster) -> None:
    done = cluster.submit(script(*SCRIPTS[name]))
    assert done.returncode == 0, done.stderr
    assert "KVLAUNCH_SECRET" not in cluster.seen("0")["env"]


@pytest.mark.parametrize("name", ["one node", "own endpoint"])
def test_no_meeting_point_where_none_is_needed(name: str, cluster: Cluster) -> None:
    done = cluster.submit(script(*SCRIPTS[name]), SLURM_JOB_NODELIST="not asked for")
    assert done.returncode == 0, done.stderr
    assert cluster.seen("0")["argv"][2:] == list(SCRIPTS[name])


def test_it_ends_as_kvlaunch_does(cluster: Cluster) -> None:
    assert cluster.submit(script(*LARGE, TWO), FAILS="5").returncode == 5


def test_nothing_starts_where_the_nodes_are_not_known(cluster: Cluster) -> None:
    done = cluster.submit(script(*LARGE, TWO), SLURM_JOB_NODELIST="broken")
    assert done.returncode == 3
    assert not (cluster.folder / "seen.srun").exists()


def test_lines_that_run_before(cluster: Cluster) -> None:
    text = script(*LARGE, TWO, before=('export FOO="$NOT_SET-bar"', "cd /"))
    done = cluster.submit(text)
    assert done.returncode == 0, done.stderr
    assert cluster.seen("1")["env"]["FOO"] == "-bar"
    assert cluster.submit(script(*LARGE, TWO, before=("false",))).returncode == 1


def test_local_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m=1").mkdir()
    numbers = {
        "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
        "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "model_type": "qwen3",
    }  # fmt: skip
    (tmp_path / "m=1" / "config.json").write_text(json.dumps(numbers))
    (tmp_path / "own" / "preset").mkdir(parents=True)
    (tmp_path / "own" / "preset" / "p.yaml").write_text("tp: 2\n")
    made = job("model=./m=1", "device=cpu", "engine.python=../bin/python", "preset=p", config_dir=Path("own"))
    assert made.words == (
        f"model={tmp_path}/m=1",
        "device=cpu",
        f"engine.python={tmp_path}/../bin/python",
        "preset=p",
    )
    assert made.command[:4] == ("kvlaunch", "up", "--config-dir", f"{tmp_path}/own")
    assert made.plan.tp_size == 2


def test_a_loopback_server_is_pointed_out() -> None:
    assert "# The server listens on 127.0.0.1" in script(*LARGE)
    assert "The server listens" not in script(*LARGE, "server.host=0.0.0.0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "tomorrow"}, "--time tomorrow: sbatch takes minutes"),
        ({"partition": "a b"}, "--partition 'a b': that is no name"),
        ({"account": "x\n#SBATCH --qos=y"}, "that is no name"),
        ({"more": ("what is this",)}, "--sbatch 'what is this': that is no option of sbatch"),
        ({"more": ("--qos=a\nrm",)}, "that is no option of sbatch"),
    ],
)
def test_options_that_sbatch_would_not_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SlurmOptions(**options)


@pytest.mark.parametrize("time", ["30", "30:00", "8:00:00", "2-0", "1-12:30", "1-12:30:15", "UNLIMITED"])
def test_limits_that_sbatch_takes(time: str) -> None:
    assert directives(script(*LARGE, time=time))["time"] == time


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (("model=Qwen3-8B",), ConfigError, "device=auto goes by the machine"),
        ((*LARGE, TWO, "node_rank=1"), ConfigError, "node_rank=1 is one node's own setting"),
        ((*LARGE, "tp=3"), PlanError, "tp=3 does not divide num_key_value_heads=8"),
        ((*LARGE, "nnodes=3"), PlanError, "cannot be split over 3 nodes evenly"),
    ],
)
def test_what_cannot_be_rendered(overrides: tuple[str, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        job(*overrides)


def test_this_machine_says_nothing_about_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SLURM_NODEID", "1")
    made: Job = job(*LARGE, TWO)
    assert (made.plan.device, made.ranks_per_node) == ("cuda", 2)
