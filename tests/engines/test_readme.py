"""What README tells a new user to type, typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.engines.harness import kvlaunch, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def command(start: str) -> str:
    return next(text for text in COMMANDS if text.startswith(start))


def environment() -> dict[str, str]:
    """A user's: kvlaunch on the PATH, nothing else of this test run."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}


def ask(text: str) -> dict[str, object]:
    out = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, env=environment(), timeout=120
    )
    answer = json.loads(out.stdout)
    assert isinstance(answer, dict)
    return answer


def test_make_up_serves_and_ctrl_c_ends_it() -> None:
    up = subprocess.Popen(
        ["bash", "-c", command("make up")],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []
    assert up.stdout is not None
    output = up.stdout
    reader = threading.Thread(target=lambda: said.extend(output), daemon=True)
    reader.start()
    try:
        wait_until(lambda: up.poll() is not None or "is served by" in "".join(said), 480, "ready")
        assert up.poll() is None, "".join(said)
        wait_until(lambda: "rank   stage" in "".join(said), 10, "the table of ranks: " + "".join(said))
        assert "http://127.0.0.1:8000" in "".join(said)
        shown = next(line.strip() for line in said if line.strip().startswith("curl "))
        for curl in (command("curl "), shown):
            assert ask(curl)["choices"]
        chat = '{"model": "tiny-qwen3", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'
        url = "http://127.0.0.1:8000/v1/chat/completions"
        assert ask(f"curl -s {url} -H 'Content-Type: application/json' -d '{chat}'")["choices"]
    finally:
        os.killpg(up.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        up.wait(60)
        reader.join(5)
        up.stdout.close()
    assert json.loads(kvlaunch("ps", "--json").stdout) == []


def test_the_plan_needs_no_gpu() -> None:
    out = subprocess.run(
        ["bash", "-c", command("kvlaunch plan")], capture_output=True, text=True, check=True, env=environment()
    )
    assert "Qwen3-8B" in out.stdout
    assert "cuda:3" in out.stdout
