"""What can be said of an address from which no answer comes."""

from __future__ import annotations

import errno
import os
import select
import socket

from kvlaunch.kv.ipc import network


class Probe:
    """Looks whether anything takes connections at an address, and never waits. ZeroMQ tries again and says nothing."""

    def __init__(self, address: str) -> None:
        host, port = network.split(address)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self._refusal = self._socket.connect_ex((host, port))

    @property
    def finding(self) -> str:
        poll = select.poll()  # select.select fails for a process with more than 1024 open files
        poll.register(self._socket, select.POLLOUT)
        if self._refusal in (0, errno.EINPROGRESS):
            if not poll.poll(0):
                return "nothing there answers an attempt to connect; is the network cut, or a firewall between?"
            self._refusal = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if self._refusal:
            return os.strerror(self._refusal)
        return "it takes connections; does its process hang, or has it another secret or run?"

    def close(self) -> None:
        self._socket.close()
