"""Shell completion: what is offered, and that the shells get it in their own form."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvlaunch.cli import complete


def words(incomplete: str, *before: str, config_dir: Path | None = None) -> list[str]:
    return [word for word, _ in complete.overrides(incomplete, list(before), config_dir)]


@pytest.mark.parametrize(
    ("incomplete", "offered"),
    [
        ("engine=", ["engine=sglang", "engine=vllm"]),
        ("engine=v", ["engine=vllm"]),
        ("+engine=v", ["+engine=vllm"]),
        ("device=", ["device=auto", "device=cpu", "device=cuda"]),
        ("kv.mode=", ["kv.mode=elastic", "kv.mode=static"]),
        ("kv.gu", ["kv.guard=true", "kv.guard=false"]),
        ("kv.guard=f", ["kv.guard=false"]),
        ("model=Qwen3-8", ["model=Qwen3-8B"]),
        ("en", ["engine=", "engine."]),
        ("tp", ["tp=", "tp=1"]),
        ("server", ["server.host=", "server.port="]),
        ("kv.ahead.", ["kv.ahead.low=", "kv.ahead.high="]),
        ("rdzv.e", ["rdzv.endpoint=", "rdzv.endpoint=ENDPOINT"]),
        ("engine.a", ["engine.args."]),
        ("tp=", []),
        ("zzz", []),
        ("zzz.y", []),
        ("zzz=", []),
    ],
)
def test_offered(incomplete: str, offered: list[str]) -> None:
    assert words(incomplete) == offered


def test_keys_of_the_top() -> None:
    offered = words("")
    assert {"engine=", "model=", "kv=", "kv.", "tp=", "pp=", "server.", "timeouts."} <= set(offered)
    assert "preset=" not in offered


def test_meanings() -> None:
    meanings = dict(complete.overrides("kv.", [], None))
    assert meanings["kv.guard="] == "Make a touch of unmapped memory crash at once (host memory)"
    assert all(
        "\n" not in text and len(text) <= 70 for word in ("", "kv.", "model.", "model=") for text in meanings_of(word)
    )


def meanings_of(incomplete: str) -> list[str]:
    return [text for _, text in complete.overrides(incomplete, [], None)]


def test_own_choices(tmp_path: Path) -> None:
    for name in ("model/mine", "preset/small"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text("")
    assert words("model=mi", config_dir=tmp_path) == ["model=mine"]
    assert words("pres", config_dir=tmp_path) == ["preset=small"]
    assert words("model=mi", config_dir=tmp_path / "gone") == []


def test_folders_for_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ac").write_text("")
    assert words(f"model={tmp_path}/a") == [f"model={tmp_path}/ab/"]
    assert words("model=/gone/x") == []


def test_bash_splits_at_the_equals_sign() -> None:
    assert words("v", "tp=1", "engine=") == ["vllm"]
    assert words("", "engine=") == ["sglang", "vllm"]


@pytest.mark.parametrize(
    ("split", "cursor", "joined", "at"),
    [
        (["kvlaunch", "engine", "=", "v"], 3, ["kvlaunch", "engine=", "v"], 2),
        (["kvlaunch", "engine", "="], 2, ["kvlaunch", "engine=", ""], 2),
        (["kvlaunch", "plan", "tp", "=", "2", "en"], 5, ["kvlaunch", "plan", "tp=2", "en"], 3),
        (["kvlaunch", "up", "model", "=", "/a", "=", "b", ""], 7, ["kvlaunch", "up", "model=/a=b", ""], 3),
        (["kvlaunch", "p"], 1, ["kvlaunch", "p"], 1),
        (["kvlaunch", ""], 1, ["kvlaunch", ""], 1),
    ],
)
def test_joining(split: list[str], cursor: int, joined: list[str], at: int) -> None:
    env = {"_KVLAUNCH_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(split), "COMP_CWORD": str(cursor)}
    complete.join_split_words(env)
    assert (env["COMP_WORDS"].split("\n"), env["COMP_CWORD"]) == (joined, str(at))


def test_joining_only_for_bash() -> None:
    env = {"_KVLAUNCH_COMPLETE": "complete_zsh", "COMP_WORDS": "a\n=\nb", "COMP_CWORD": "2"}
    before = dict(env)
    complete.join_split_words(env)
    assert env == before


def command(tmp_path: Path) -> dict[str, str]:
    """An environment in which `kvlaunch` is this checkout's."""
    script = tmp_path / "bin" / "kvlaunch"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvlaunch.cli.main "$@"\n')
    script.chmod(0o755)
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": root}


def ask(shell: str, env: dict[str, str], **asked: str) -> list[str]:
    full = {**env, "_KVLAUNCH_COMPLETE": f"complete_{shell}", **asked}
    done = subprocess.run(["kvlaunch"], env=full, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_itself(tmp_path: Path) -> None:
    env = {**command(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    show = ["kvlaunch", "--show-completion", "bash"]
    script = subprocess.run(show, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    function = script.partition("(")[0].strip()
    asked = [
        ("kvlaunch pl", ["plan"]),
        ("kvlaunch engine = v", ["vllm"]),
        ("kvlaunch plan engine = vllm kv.gu", ["kv.guard=true", "kv.guard=false"]),
        ("kvlaunch plan --js", ["--json"]),
        ("kvlaunch model make", ["make-tiny"]),
    ]
    for line, expected in asked:
        code = f"{script}\nCOMP_WORDS=({line})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n{function} kvlaunch\n"
        code += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
        done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == expected, line


def test_zsh_gets_its_form(tmp_path: Path) -> None:
    (answer,) = ask("zsh", command(tmp_path), _TYPER_COMPLETE_ARGS="kvlaunch engine=v")
    assert answer.startswith('_arguments \'*: :(("engine=vllm"')


def test_fish_gets_its_form(tmp_path: Path) -> None:
    env = command(tmp_path)
    lines = ask(
        "fish", env, _TYPER_COMPLETE_FISH_ACTION="get-args", _TYPER_COMPLETE_ARGS="kvlaunch plan engine=vllm kv.mode="
    )
    assert [line.split("\t")[0] for line in lines] == ["kv.mode=elastic", "kv.mode=static"]


def test_completion_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from kvlaunch.cli.main import main\n"
        "try: main([])\n"
        "except SystemExit: pass\n"
        "bad = {'hydra', 'omegaconf', 'yaml', 'rich', 'torch', 'zmq', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    asked = {"_KVLAUNCH_COMPLETE": "complete_bash", "COMP_WORDS": "kvlaunch\nplan\nengine\n=\n", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sglang", "vllm"]
