"""The sockets of a stage's listener: what is there already, who may reach them."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kvlaunch.kv.ipc.links import listen_seqpacket
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.messages import (
    Ping,
    Pong,
)
from tests.integration.stage_kit import HEAD, Raw, Stage, memory


def leave_dead_socket(path: Path, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(os.fspath(path))


def test_what_a_dead_process_left_is_replaced(folder: Path) -> None:
    leave_dead_socket(folder / "s0", socket.SOCK_STREAM)
    leave_dead_socket(folder / "p0", socket.SOCK_SEQPACKET)
    with Stage(folder) as stage, closing(stage.channel()) as channel:
        channel.map([(3, 1)])


def test_a_live_listener_is_not_pushed_away(stage: Stage) -> None:
    with pytest.raises(OSError, match="another process listens there"):
        stage.new_listener().start()
    with closing(stage.channel()) as channel:
        channel.map([(3, 1)])


def test_a_live_peer_socket_is_not_pushed_away(folder: Path) -> None:
    other = listen_seqpacket(folder / "p0", 1)
    with pytest.raises(OSError, match="another process listens there"):
        Stage(folder).listener.start()
    other.close()
    (folder / "p0").unlink()


def test_a_channel_finds_a_listener_that_comes_late_or_again(folder: Path) -> None:
    first, second = Stage(folder, tp_size=1), Stage(folder, tp_size=1)
    with closing(first.channel()) as channel:
        starter = threading.Timer(0.1, first.listener.start)
        starter.start()
        channel.map([(3, 1)])
        starter.join()
        first.listener.close()
        with second:
            channel.map([(4, 1)])
    assert second.ranks[0].mapped_runs() == [(0, 1), (4, 1)]


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "s0").write_text("mine")
    with pytest.raises(FileExistsError):
        Stage(folder).listener.start()
    assert (folder / "s0").read_text() == "mine"
    (folder / "s0").unlink()


def test_a_folder_that_does_not_exist_is_an_error_and_leaves_nothing(folder: Path) -> None:
    rank = memory(0)
    for endpoint, peer_path in ((f"ipc://{folder}/no/s0", folder / "p0"), (f"ipc://{folder}/s0", folder / "no/p0")):
        listener = StageListener(rank, endpoint=endpoint, peer_path=peer_path, peers=[1])
        with pytest.raises(OSError):
            listener.start()
        listener.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "ipc://relative", "ipc://@abstract", "/tmp/s0"])
def test_only_files_that_others_cannot_reach_are_endpoints(folder: Path, endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        StageListener(memory(0), endpoint=endpoint, peer_path=folder / "p0", peers=[])


def test_sockets_are_for_their_owner_alone(stage: Stage, folder: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 2


def test_another_user_is_turned_away(stage: Stage, raw: Raw) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    pid = os.fork()
    if pid == 0:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(5)
                os.chmod(stage.peer_path, 0o666)  # noqa: PTH101
                os.chmod(stage.peer_path.parent, 0o755)  # noqa: PTH101
                os.setuid(12345)
                sock.connect(os.fspath(stage.peer_path))
                os._exit(0 if sock.recv(100) == b"" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert isinstance(raw.ask(Ping(**HEAD, seq=1)), Pong)
