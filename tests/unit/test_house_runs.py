"""The tests of both engines end with one line that counts both runs."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("run_tests")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sglang: x\n")
    for engine in ("vllm", "sglang"):
        link = tmp_path / ".venv" / engine / "bin" / "python"
        link.parent.mkdir(parents=True)
        link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        link.chmod(0o755)
    return module


@pytest.fixture
def runs(
    module: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[int, str]]:
    """Runs a file of these tests: the exit status, and the last line that was printed."""
    path = tmp_path / "test_it.py"
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "-p", "no:cacheprovider", str(path)])

    def run(tests: str) -> tuple[int, str]:
        path.write_text("import pytest\n" + tests)
        return module.main(), capfd.readouterr().out.splitlines()[-1]

    return run


ONE = "def test_a(): pass\n@pytest.mark.sglang\ndef test_b(): pass\n"
BAD = "@pytest.mark.sglang\ndef test_c(): assert 0\n"


@pytest.mark.parametrize(
    ("tests", "status", "said"),
    [
        (ONE, 0, " 2 passed in "),
        (ONE + BAD, 1, " 1 failed, 2 passed in "),
        ("def test_a(): pass\n", 0, " 1 passed in "),
        ("", 5, " no tests ran in "),
        ("@pytest.fixture\ndef f(): assert 0\ndef test_x(f): pass\n" + ONE, 1, " 2 passed, 1 error in "),
    ],
)
def test_both_runs_count(runs: Callable[[str], tuple[int, str]], tests: str, status: int, said: str) -> None:
    got, line = runs(tests)
    assert got == status
    assert said in line
    assert line.startswith("===")


CRASH = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGSEGV)\n"


def test_a_crash_after_the_last_test_is_said_and_counts(
    runs: Callable[[str], tuple[int, str]], module: ModuleType
) -> None:
    status, line = runs(CRASH + "def test_a(): pass\n")
    assert status == 128 + 11
    assert " 1 passed, 2 errors in " in line  # both runs import the file
    assert module.ending(-11) == "SIGSEGV"


def test_closing_lines_of_pytest_are_understood(module: ModuleType) -> None:
    line = "==== 1 failed, 12 passed, 3 deselected, 2 warnings, 1 error in 298.26s (0:04:58) ===="
    assert module.CLOSING.match(line)
    assert module.CLOSING.match("12 passed, 84 deselected in 298.26s (0:04:58)")
    assert module.counts(line) == Counter(failed=1, passed=12, deselected=3, warning=2, error=1)
    assert module.closing_line(Counter(passed=1, error=2), 3.0).strip("=") == " 1 passed, 2 errors in 3.00s "
