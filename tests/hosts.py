"""Several hosts on one machine: namespaces on a bridge, each with its name, its address, its shared memory and its run
folders. An engine that meets its ranks in shared memory must find that those of another host have another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.leaks import NETNS_PREFIX, SHM, wait_until_gone

_NUMBERS = itertools.count()
SHM_GONE_S = 5.0


def ip(*words: str) -> None:
    """Raises OSError with what `ip` says where it fails."""
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def possible() -> bool:
    """Whether this user may make namespaces here."""
    name = f"{NETNS_PREFIX}try{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
        ip("link", "add", name, "type", "bridge")
        ip("link", "del", name)
    except OSError:
        return False
    return True


@dataclass
class Host:
    """One of them. Commands run in its namespace, with its name."""

    name: str
    addr: str
    addr6: str
    namespace: str
    link: str
    """Its end of the cable, on the bridge."""
    runtime: Path
    """XDG_RUNTIME_DIR there."""
    holder: subprocess.Popen[bytes]
    """Keeps its other namespaces: for its name, its shared memory and its mounts."""

    def command(self, *words: str) -> list[str]:
        where = ["--net", "--uts", "--ipc", "--mount", f"--wd={Path.cwd()}"]
        return ["nsenter", f"--target={self.holder.pid}", *where, "--", *words]

    @property
    def shm(self) -> list[str]:
        """What lies in its shared memory."""
        return sorted(path.name for path in Path(f"/proc/{self.holder.pid}/root{SHM}").iterdir())

    def knows(self, names: dict[str, str]) -> None:
        """Let it know these names, with their addresses, and no others."""
        file = self.runtime / "hosts"
        file.write_text("".join(f"{addr} {name}\n" for name, addr in {"localhost": "127.0.0.1", **names}.items()))
        subprocess.run(self.command("mount", "--bind", str(file), "/etc/hosts"), check=True)

    def environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), **more}

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=env or self.environ(), capture_output=True, text=True, check=False, timeout=60
        )

    def cut(self) -> None:
        """Pull the cable out."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts that reach each other, and that this machine reaches. Skips the test where that is not allowed."""
    if not possible():
        pytest.skip("network namespaces need root")
    number = next(_NUMBERS)
    # Never the same again: the kernel may keep the devices of an ended host for a while.
    tag = f"{NETNS_PREFIX}{os.getpid() % 100000:x}-{number:x}"
    subnet = f"10.{100 + os.getpid() % 100}.{number % 250}"
    bridge = f"{tag}br"
    with contextlib.ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        made = []
        for i in range(count):
            name, namespace = f"host{'abcdefgh'[i]}", f"{tag}{i}"
            runtime = Path(tempfile.mkdtemp(prefix="kvl-h", dir="/tmp"))  # sockets need a short path
            stack.callback(shutil.rmtree, runtime, ignore_errors=True)
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            host = Host(
                name=name,
                addr=f"{subnet}.{i + 2}",
                addr6=f"fd77:{number % 250:x}::{i + 2}",
                namespace=namespace,
                link=f"{tag}v{i}",
                runtime=runtime,
                holder=stack.enter_context(_held(namespace, name)),
            )
            ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            # A connection that was cut keeps its namespace, and this device, for minutes.
            stack.callback(ip, "link", "del", host.link)
            ip("link", "set", host.link, "master", bridge, "up")
            for words in (
                ["addr", "add", f"{host.addr}/24", "dev", "eth0"],
                ["addr", "add", f"{host.addr6}/64", "dev", "eth0", "nodad"],
                ["link", "set", "eth0", "up"],
            ):
                ip("-n", host.namespace, *words)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            made.append(host)
        yield made
        left = wait_until_gone(lambda: [f"{host.name}: {name}" for host in made for name in host.shm], SHM_GONE_S)
        assert not left, f"left in shared memory: {left}"


@contextlib.contextmanager
def _held(namespace: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a network namespace with namespaces of its own for everything else that belongs to a host."""
    script = f"hostname {name} && mount -t tmpfs -o mode=1777 tmpfs {SHM} && echo && exec cat"
    command = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--ipc", "--mount", "sh", "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:  # its end of input is its end, also when this process is killed
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n", "no namespaces"
        yield process
