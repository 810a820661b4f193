"""tools/: building environments and running steps."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvlaunch

TOOLS = Path(kvlaunch.__file__).resolve().parent.parent / "tools"


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("env")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("steps")


def test_unknown_engine_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, TOOLS / "env.py", "vlm"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "no engine 'vlm'" in done.stderr


def test_base_changes_with_its_lock_files(env: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "a.txt"
    lock.write_text("one==1\n")
    first = env.base_key((lock,))
    assert env.base_key((lock,)) == first
    lock.write_text("one==2\n")
    assert env.base_key((lock,)) != first


def test_interrupted_build_is_not_taken_for_a_good_one(env: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    assert not env.finished(folder, "key")
    env.finish(folder, "key")
    assert env.finished(folder, "key")
    assert not env.finished(folder, "another key")
    (folder / "bin" / "python").unlink()
    assert not env.finished(folder, "key")


def hold(
    lock: Path, tools: str, held: multiprocessing.synchronize.Event, let_go: multiprocessing.synchronize.Event
) -> None:
    sys.path.insert(0, tools)
    env = importlib.import_module("env")
    with env.only_builder(lock):
        held.set()
        let_go.wait(30)


def test_second_builder_waits(env: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spawn = multiprocessing.get_context("spawn")
    held, let_go = spawn.Event(), spawn.Event()
    lock = tmp_path / "base.lock"
    other = spawn.Process(target=hold, args=(lock, str(TOOLS), held, let_go))
    other.start()
    try:
        assert held.wait(30)

        def say(text: str) -> None:
            assert "waiting for another build of base" in text
            let_go.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(env, "say", say)
            with env.only_builder(lock):
                assert let_go.is_set()
    finally:
        let_go.set()
        other.join(30)
        other.close()


def test_commands_of_the_base_run_the_checkouts_python(env: ModuleType, tmp_path: Path) -> None:
    base, own = tmp_path / "a base" / "x", tmp_path / "own é" / "y"
    for folder in (base, own):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
    script = "import sys; print(sys.argv[1:], sys.flags.isolated)\n"
    (base / "bin" / "plain").write_text(f"#!{base}/bin/python\n{script}")
    (base / "bin" / "wrapped").write_text(f"#!/bin/sh\n'''exec' \"{base}/bin/python\" \"$0\" \"$@\"\n' '''\n{script}")
    (base / "bin" / "other").write_text("#!/bin/sh\necho other\n")
    (base / "bin" / "binary").write_bytes(b"\x7fELF")
    (own / "bin" / "kept").write_text("own")
    (base / "bin" / "kept").write_text("base")
    env.link_commands(base, own)
    for name in ("plain", "wrapped"):
        made = own / "bin" / name
        assert str(base) not in made.read_text()
        out = subprocess.run([made, "a b"], capture_output=True, text=True, timeout=30, check=True).stdout
        assert out == "['a b'] 0\n"
    assert (own / "bin" / "binary").resolve() == base / "bin" / "binary"
    assert (own / "bin" / "kept").read_text() == "own"
    assert not (own / "bin" / "other").exists()


def test_step_shows_output_only_where_it_failed(steps: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main(["good", "--", sys.executable, "-c", "print('noise')"]) == 0
    assert "noise" not in capsys.readouterr().err
    assert steps.main(["bad", "--", sys.executable, "-c", "print('why'); raise SystemExit(3)"]) == 3
    err = capsys.readouterr().err
    assert "why" in err
    assert "bad: FAILED" in err


def test_step_keeps_the_log_and_its_lines(steps: ModuleType, tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "log"
    command = [sys.executable, "-c", "print('one'); print('two')"]
    assert steps.run_step("s", command, log=log, on_line=lines.append, env=dict(os.environ)) == "one\ntwo\n"
    assert log.read_text() == "one\ntwo\n"
    assert lines == ["one\n", "two\n"]


def test_missing_torch_is_explained(env: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = "WARNING: noise\nERROR: No matching distribution found for torch==2.13.0+cpu\n"
    with pytest.raises(env.StepError), env.explained(tmp_path / "log"):
        raise env.StepError("install", 1, output)
    err = capsys.readouterr().err
    assert "noise" not in err
    assert "PIP_ARGS='--extra-index-url" in err
    assert str(tmp_path / "log") in err
