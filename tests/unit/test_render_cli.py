"""`kvlaunch render` as it is typed: where the text goes, mistakes, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvlaunch.cli.main import main
from tests.unit.render_jobs import LARGE, TWO

Cli = Callable[..., tuple[int, str, str]]
IMAGE = "--image=registry.example.com/kvlaunch:1"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVLAUNCH_DEBUG", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as e:
            main(["render", *argv])
        out, err = capsys.readouterr()
        return int(e.value.code or 0), out, err

    return run


def test_slurm(cli: Cli, tmp_path: Path) -> None:
    options = ("--time", "8:00:00", "--partition=gpu", "--account", "us", "--sbatch=--qos=high", "--sbatch", "x=1")
    code, out, err = cli("slurm", *LARGE, *options, TWO, "--before", "module load cuda", "--cpus", "5", "--memory=7GiB")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "#!/bin/bash"
    wanted = ["time=8:00:00", "partition=gpu", "account=us", "qos=high", "x=1", "cpus-per-task=5", "mem=7168M"]
    assert {f"#SBATCH --{option}" for option in wanted} <= set(lines)
    assert "module load cuda" in lines
    assert list(tmp_path.iterdir()) == []


def test_kubernetes(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("kubernetes", IMAGE, *LARGE, TWO, "--namespace", "n", "--replicas", "2", "--secret", "s")
    assert (code, err) == (0, "")
    documents = list(yaml.safe_load_all(out))
    assert [document["kind"] for document in documents] == ["Service", "LeaderWorkerSet"]
    assert documents[1]["spec"]["replicas"] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_file(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("slurm", *LARGE, TWO, "--output", "my job.sh")
    assert (code, out, err) == (0, "wrote my job.sh; submit it with: sbatch 'my job.sh'\n", "")
    assert (tmp_path / "my job.sh").read_text() == cli("slurm", *LARGE, TWO)[1]
    (tmp_path / "long").write_text("x" * 100_000)
    cli("kubernetes", IMAGE, *LARGE, TWO, "-o", "long")
    assert (tmp_path / "long").read_text() == cli("kubernetes", IMAGE, *LARGE, TWO)[1]


def test_a_file_with_a_secret_is_for_its_owner_alone(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("")
    path.chmod(0o644)
    assert cli("kubernetes", IMAGE, *LARGE, TWO, "--with-secret", "-o", "x.yaml")[0] == 0
    assert path.stat().st_mode & 0o777 == 0o600
    first = yaml.safe_load(path.read_text().partition("---")[0])["stringData"]["secret"]
    assert first not in cli("kubernetes", IMAGE, *LARGE, TWO, "--with-secret")[1]


MISTAKES = [
    (["slurm", *LARGE, "--tiem=1"], 2, "error: There is no option '--tiem'.\n  Did you mean --time?\n"),
    (
        ["slurm", *LARGE, "--partiton", "gpu"],
        2,
        "error: There is no option '--partiton'.\n  Did you mean --partition?\n",
    ),
    (["slurm", *LARGE, IMAGE], 2, "error: --image is an option of render kubernetes, not of render slurm.\n"),
    (
        ["kubernetes", *LARGE, "--time", "1"],
        2,
        "error: --time is an option of render slurm, not of render kubernetes.\n",
    ),
    (
        ["slurm", *LARGE, "--gpus", "2"],
        2,
        "error: There is no option '--gpus'.\n"
        "  The plan says how many, one a rank: device=cuda, and tp, pp and nnodes\n",
    ),
    (
        ["kubernetes", *LARGE],
        2,
        "error: render kubernetes needs --image: what the pods run.\n"
        "  It must have kvlaunch and vllm. For example: --image registry.example.com/kvlaunch:1\n",
    ),
    (
        ["slurm", "model=Qwen3-8B"],
        2,
        "error: device=auto goes by the machine that it is asked on, and that is not the one that will serve.\n"
        "  Say what the nodes have: device=cuda or device=cpu\n",
    ),
    (
        ["slurm", *LARGE, "tp=3"],
        3,
        "error: tp=3 does not divide num_key_value_heads=8 (Qwen3-8B); use tp=1, 2, 4 or 8\n",
    ),
    (
        ["slurm", *LARGE, "--memory", "much"],
        2,
        "error: --memory wants a size in bytes, got 'much'.\n"
        "  Write 2GiB, 512MiB, 1.5GiB, 10GB or a number of bytes.\n",
    ),
    (["slurm", "tpp=2"], 2, "error: There is no key 'tpp'.\n  Did you mean tp=2?\n"),
    (
        ["nomad", *LARGE],
        2,
        "error: No such command 'nomad'.\n  See kvlaunch render --help.\n",
    ),
]


@pytest.mark.parametrize(("argv", "code", "err"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_mistakes(cli: Cli, argv: list[str], code: int, err: str) -> None:
    assert cli(*argv) == (code, "", err)


def test_a_mistake_leaves_the_file_as_it_was(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("before")
    assert cli("slurm", *LARGE, "tp=3", "-o", "f")[0] == 3
    assert (tmp_path / "f").read_text() == "before"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["render", "sl"], ["slurm"]),
        (["render", "kubernetes", "--im"], ["--image"]),
        (["render", "slurm", "kv.gu"], ["kv.guard=true", "kv.guard=false"]),
    ],
)
def test_completion(typed: list[str], offered: list[str]) -> None:
    words = ["kvlaunch", *typed]
    asked = {"_KVLAUNCH_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", "from kvlaunch.cli.main import main; main([])"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == offered


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from kvlaunch.cli.main import main\n"
        "try: main(['render', 'slurm', 'model=tiny-qwen3', 'device=cpu'])\n"
        "except SystemExit as e: assert not e.code\n"
        "bad = {'torch', 'vllm', 'sglang', 'zmq', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
