"""The command line: verbs, options among overrides, exit codes, and what a person sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlaunch import __version__, errors
from kvlaunch.cli import words
from kvlaunch.cli.main import main
from kvlaunch.config.schema import LaunchConfig
from kvlaunch.plan.types import LaunchPlan

TINY = "model=tiny-qwen3"
VERBS = ["up", "plan", "config", "ps", "stop", "logs", "model"]

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVLAUNCH_DEBUG", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as e:
            main(list(argv))
        out, err = capsys.readouterr()
        return int(e.value.code or 0), out, err

    return run


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Stand-ins for the verbs that act on runs: each call is noted, and returns 7."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("up", "ps", "stop", "logs"):
        module = types.ModuleType(f"kvlaunch.cli.{name}")

        def run(*args: Any, _name: str = name, **kwargs: Any) -> int:
            calls.append((_name, args, kwargs))
            return 7

        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(f"kvlaunch.cli.{name}", module, raising=False)
    return calls


@pytest.mark.parametrize(
    ("argv", "routed"),
    [
        (["tp=2"], ["up", "tp=2"]),
        (["+tp=2"], ["up", "+tp=2"]),
        (["~engine.args.x"], ["up", "~engine.args.x"]),
        (["--tp=2"], ["up", "--tp=2"]),
        (["-d", "tp=2"], ["up", "-d", "tp=2"]),
        (["--config-dir", "d", "tp=2"], ["up", "--config-dir", "d", "tp=2"]),
        (["plan", "tp=2"], ["plan", "tp=2"]),
        (["plna", "tp=2"], ["plna", "tp=2"]),
        (["Qwen/Qwen3-8B"], ["up", "Qwen/Qwen3-8B"]),
        (["--help"], ["--help"]),
        (["-h"], ["-h"]),
        (["--version"], ["--version"]),
        (["--show-completion", "bash"], ["--show-completion", "bash"]),
        ([], []),
    ],
)
def test_the_verb_may_be_left_out(argv: list[str], routed: list[str]) -> None:
    assert words.route(argv, VERBS) == routed


def test_up(cli: Cli, verbs: list[Any]) -> None:
    assert cli("engine=vllm", "-d", TINY, "--json", "tp=2", "-v") == (7, "", "")
    ((name, (config,), options),) = verbs
    assert (name, options) == ("up", {"detach": True, "verbose": True, "json_output": True})
    assert isinstance(config, LaunchConfig)
    assert (config.tp, config.model.name) == (2, "tiny-qwen3")


def test_up_by_its_name(cli: Cli, verbs: list[Any]) -> None:
    assert cli("up", TINY)[0] == 7
    assert verbs[0][2] == {"detach": False, "verbose": False, "json_output": False}


@pytest.mark.parametrize(
    ("argv", "call"),
    [
        (["ps"], ("ps", (), {"json_output": False})),
        (["ps", "--json"], ("ps", (), {"json_output": True})),
        (["stop"], ("stop", (None,), {"all_runs": False, "json_output": False})),
        (["stop", "r", "--json"], ("stop", ("r",), {"all_runs": False, "json_output": True})),
        (["stop", "--all"], ("stop", (None,), {"all_runs": True, "json_output": False})),
        (["logs"], ("logs", (None,), {"rank": None, "follow": False})),
        (["logs", "r", "--rank", "3", "-f"], ("logs", ("r",), {"rank": 3, "follow": True})),
    ],
)
def test_verbs_on_runs(cli: Cli, verbs: list[Any], argv: list[str], call: tuple[Any, ...]) -> None:
    assert cli(*argv) == (7, "", "")
    assert verbs == [call]


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"kvlaunch {__version__}\n", "")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help(cli: Cli, argv: list[str]) -> None:
    code, out, err = cli(*argv)
    assert (code, err) == (0, "")
    assert all(f" {verb} " in out for verb in VERBS)


@pytest.mark.parametrize("verb", [*VERBS, "model make-tiny"])
def test_help_of_verbs(cli: Cli, verb: str) -> None:
    code, out, _ = cli(*verb.split(), "--help")
    assert code == 0
    assert f"kvlaunch {verb}" in out


MISTAKES = [
    (["tpp=2"], 2, "error: There is no key 'tpp'.\n  Did you mean tp=2?\n"),
    (
        ["engine=vlm"],
        2,
        "error: engine=vlm: there is no such engine.\n  Did you mean engine=vllm? Choices: sglang, vllm.\n",
    ),
    (["plan", TINY, "tp=two"], 2, "error: tp wants a whole number, got 'two'.\n  For example: tp=2\n"),
    (["plna", "tp=2"], 2, "error: No such command 'plna'. Did you mean 'plan'?\n  See kvlaunch --help.\n"),
    (["plan", "--detatch"], 2, "error: There is no option '--detatch'.\n  Did you mean --detach?\n"),
    (["--json", "plan"], 2, "error: 'plan' is a verb, and a verb comes first.\n  Write: kvlaunch plan ...\n"),
    (
        ["plan", "--tp-size", "2"],
        2,
        "error: There is no option '--tp-size'.\n  Settings are written without dashes and with '=': tp=VALUE\n",
    ),
    (["Qwen/Qwen3-8B"], 2, "error: 'Qwen/Qwen3-8B' is not an override.\n  To serve that model: model=Qwen/Qwen3-8B\n"),
    (["stop", "r", "--all"], 2, "error: Give a RUN or --all, not both.\n  See kvlaunch stop --help.\n"),
    (["ps", "x"], 2, "error: Got unexpected extra argument(s) (x)\n  See kvlaunch ps --help.\n"),
]


@pytest.mark.parametrize(("argv", "code", "err"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_mistakes(cli: Cli, argv: list[str], code: int, err: str) -> None:
    assert cli(*argv) == (code, "", err)


@pytest.mark.parametrize(
    ("raised", "code", "err"),
    [
        (
            errors.PlanError("It does not fit.", hint="Use less.\nOr more."),
            3,
            "error: It does not fit.\n  Use less.\n  Or more.\n",
        ),
        (
            errors.EngineError("Rank 1 died.", rank=1, log_path="/l/rank1.log", log_tail="a\nValueError: b\n"),
            5,
            "error: Rank 1 died.\n  | a\n  | ValueError: b\n  The whole log: /l/rank1.log\n",
        ),
        (errors.RunNotFoundError("No such run."), 9, "error: No such run.\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "error: Permission denied: /x\n  KVLAUNCH_DEBUG=1 shows where it happened.\n",
        ),
    ],
)
def test_errors_become_exit_codes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, err: str
) -> None:
    module = types.ModuleType("kvlaunch.cli.ps")

    def run(*, json_output: bool) -> int:
        raise raised

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("kvlaunch.cli.ps", module, raising=False)
    assert cli("ps") == (code, "", err)


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAUNCH_DEBUG", "1")
    with pytest.raises(errors.ConfigError):
        main(["plan", "tpp=2"])


def test_config_is_yaml_that_says_where_values_come_from(cli: Cli) -> None:
    import yaml

    code, out, err = cli(
        "config", TINY, "--tp=2", "name=a: #b", "kv.reserve=1536MiB", 'engine.args.o={"a": [1, "x, y"]}'
    )
    assert (code, err) == (0, "")
    lines = {line.split(":")[0].strip(): line for line in out.splitlines()}
    assert lines["tp"].endswith("# --tp=2")
    assert lines["num_layers"].endswith("# model/tiny-qwen3.yaml")
    assert lines["port"].endswith("# default")
    assert lines["model"].endswith("# model=tiny-qwen3")
    parsed = yaml.safe_load(out)
    assert (parsed["tp"], parsed["name"], parsed["kv"]["reserve"]) == (2, "a: #b", "1536MiB")
    assert parsed["engine"]["args"] == {"o": {"a": [1, "x, y"]}}


def test_composed_config_is_a_preset(cli: Cli, tmp_path: Path) -> None:
    typed = ("name=a: #b", "tp=2", "kv.reserve=3MiB", "engine.args.v=1.10", "engine.env.X=true", "model=/data/ä=1")
    before = json.loads(cli("config", "--json", *typed)[1])
    own = tmp_path / "own" / "preset"
    own.mkdir(parents=True)
    own.joinpath("same.yaml").write_text(cli("config", *typed)[1], encoding="utf-8")
    code, out, err = cli("config", "--json", "preset=same", "--config-dir", "own")
    assert (code, err) == (0, "")
    assert {**json.loads(out), "origins": 0} == {**before, "origins": 0}


def test_config_as_json(cli: Cli) -> None:
    code, out, _ = cli("config", "--json", TINY, "tp=2")
    value = json.loads(out)
    assert (code, value["tp"], value["kv"]["reserve"], value["engine"]["name"]) == (0, 2, 2 << 30, "vllm")
    assert (value["origins"]["tp"], value["origins"]["kv.mode"]) == ("tp=2", "kv/elastic.yaml")


def test_groups(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\n")
    code, out, _ = cli("config", "--groups", "--config-dir", str(tmp_path))
    lines = out.splitlines()
    assert code == 0
    assert {"engine=", "  vllm  (default)", "  Qwen3-8B", f"  mine  ({tmp_path}/model/mine.yaml)"} <= set(lines)
    groups = json.loads(cli("config", "--groups", "--json")[1])
    assert groups["kv"] == ["elastic", "static"]
    assert list(groups) == ["engine", "model", "kv", "device", "cluster", "preset"]


def test_plan_as_json(cli: Cli) -> None:
    code, out, err = cli("plan", "engine=vllm", "tp=2", "--json", "pp=2", "model=Qwen3-8B", "device=cuda")
    assert (code, err) == (0, "")
    plan = LaunchPlan.from_json(out.encode())
    assert (plan.world_size, [r.global_rank for r in plan.ranks]) == (4, [0, 1, 2, 3])


def test_plan_for_people(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = cli("plan", "engine=vllm", "tp=2", "pp=2", "model=Qwen3-8B", "device=cuda", "engine.args.x=a b")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["3", "1", "1", "0", "cuda:3", "18-35", "3.81GiB", "36KiB", "576KiB"] in rows
    assert "tp 2 x pp 2 = 4 on 1 node" in out
    assert "    --x 'a b'" in out
    assert "Chosen for you" in out


def test_plan_in_a_narrow_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = cli("plan", "tp=2", TINY, "device=cpu")
    assert "rank 1: stage 0, tp rank 1, node 0, device cpu, layers 0-3" in out


def test_plan_of_many_ranks_is_folded(cli: Cli) -> None:
    _, out, _ = cli("plan", "tp=8", "pp=8", "model=Llama-3.1-405B", "device=cuda")
    rows = [line.split()[:6] for line in out.splitlines()]
    assert ["56-63", "7", "0-7", "0", "cuda:56-63", "111-125"] in rows
    assert len(out.splitlines()) < 100


def test_nothing_appears_where_the_user_stands(cli: Cli, tmp_path: Path) -> None:
    for argv in (["plan", TINY], ["config", TINY], ["config", "--groups"], ["plan", TINY, "--json"], ["tpp=1"]):
        cli(*argv)
    assert list(tmp_path.iterdir()) == []


def run(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvlaunch.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("argv", [["--help"], ["plan", TINY, "tp=2"], ["config", TINY], ["tpp=2"]])
def test_nothing_heavy_is_imported(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from kvlaunch.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "bad = {'torch', 'vllm', 'sglang', 'zmq', 'transformers', 'numpy'} & set(sys.modules)\n"
        "if sys.argv[1] == '--help': bad |= {'hydra', 'omegaconf', 'yaml', 'msgspec', 'psutil'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvlaunch.cli.main", "plan", TINY, "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode in (1, 141)


def test_the_whole_way_in_an_awkward_folder(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "folder"\nwith everything'
    folder.mkdir()
    done = run("config", "model=./a=b", "name=ä#1", "--tp=2", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["model"]["path"], value["name"], value["tp"]) == (str(folder / "a=b"), "ä#1", 2)
    assert list(folder.iterdir()) == []


def test_an_encoding_without_the_letter() -> None:
    done = run("config", TINY, "name=ä", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "name: \\xe4" in done.stdout


def test_colours_only_for_a_terminal(tmp_path: Path) -> None:
    import pty

    def err_of(env: dict[str, str]) -> bytes:
        main_fd, side_fd = pty.openpty()
        command = [sys.executable, "-m", "kvlaunch.cli.main", "tpp=2"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=side_fd, env={**os.environ, **env})
        os.close(side_fd)
        process.wait(60)
        text = os.read(main_fd, 4096)
        os.close(main_fd)
        return text

    assert b"\x1b[1;31merror:" in err_of({"TERM": "xterm", "NO_COLOR": ""})
    assert b"\x1b" not in err_of({"TERM": "xterm", "NO_COLOR": "1"})
