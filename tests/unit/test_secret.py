"""The run's secret: what is one, where it is read, which keys are made from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from kvlaunch.cli.main import main
from kvlaunch.errors import ConfigError
from kvlaunch.kv.ipc.curve import client_keys, server_keys
from kvlaunch.kv.ipc.roles import rank_role, stage_role
from kvlaunch.secret import Secret, load_secret, new_secret

SECRET = Secret("k" * 43)


def test_new_ones_differ_and_hold_256_bits() -> None:
    made = {new_secret().text for _ in range(50)}
    assert len(made) == 50
    assert {len(text) for text in made} == {43}


@pytest.mark.parametrize(
    "text", ["", "k" * 31, "k" * 1025, "k" * 40 + "\n" + "k" * 40, "k " * 40, "é" * 40, "k\0" * 40]
)
def test_what_is_no_secret_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="secret") as error:
        Secret(text)
    assert "kvlaunch secret new" in str(error.value)
    assert not text or text not in str(error.value)


def test_it_is_not_shown_where_it_is_printed() -> None:
    assert SECRET.text not in repr(SECRET)
    keys = client_keys(SECRET, "r")
    assert keys.private.decode() not in repr(keys)


def test_none_given_is_none() -> None:
    assert load_secret(None, {}) is None
    assert load_secret(None, {"KVLAUNCH_SECRET": ""}) is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a secret"
    path.write_text(SECRET.text + "\n")
    path.chmod(0o600)
    return path


def test_a_file_is_read_and_may_say_the_same_as_the_variable(file: Path) -> None:
    assert load_secret(file, {}) == SECRET
    assert load_secret(str(file), {"KVLAUNCH_SECRET": SECRET.text}) == SECRET
    file.chmod(0o400)
    assert load_secret(file, {}) == SECRET
    with pytest.raises(ConfigError, match="hold different secrets"):
        load_secret(file, {"KVLAUNCH_SECRET": new_secret().text})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_touch_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as error:
        load_secret(file, {})
    assert f"chmod 600 {file}" in (error.value.hint or "")


def test_what_is_no_such_file_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_secret(tmp_path / "no", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_secret(tmp_path, {})
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="no file"):
        load_secret(tmp_path / "fifo", {})
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="printable"):
        load_secret(file, {})
    file.write_text("k" * 100_000)
    with pytest.raises(ConfigError, match="characters"):
        load_secret(file, {})


def test_keys_are_the_same_on_every_node_and_in_every_version() -> None:
    keys = server_keys(SECRET, "job7", stage_role(1))
    assert keys == server_keys(Secret("k" * 43), "job7", stage_role(1))
    assert keys.public == zmq.curve_public(keys.private)
    assert keys.public == b"j3I.jc8OastJE[1tArTB0<ICFOT0gvPT42Ex-rfc"
    assert client_keys(SECRET, "job7").public == b"2l1q&@AOJw]zP&qEm:VhK@pQTBl]bk3?6C>lDMw="


def test_another_secret_run_stage_or_role_has_other_keys() -> None:
    keys = [
        server_keys(secret, run, role)
        for secret in (SECRET, new_secret())
        for run in ("a", "b")
        for role in (stage_role(0), stage_role(1), rank_role(0), rank_role(1))
    ] + [client_keys(secret, run) for secret in (SECRET, new_secret()) for run in ("a", "b")]
    assert len({pair.public for pair in keys}) == len({pair.private for pair in keys}) == 20


def test_the_verb_prints_one_that_is_good_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["secret", "new"])
    assert ended.value.code == 0
    Secret(capsys.readouterr().out.strip())
