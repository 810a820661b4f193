"""Connections inside a host: messages of any size, deadlines, and a side that is gone."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from kvlaunch.kv.ipc.links import Link, LinkClosedError


@pytest.mark.parametrize("size", [0, 1, 59_999, 60_000, 60_001, 150_000, 1 << 20])
def test_links_carry_messages_of_any_size(size: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a, b = Link(ours), Link(theirs)
    payload = os.urandom(size)
    sender = threading.Thread(target=a.send, args=(5, payload))
    sender.start()
    number, body = b.receive()
    sender.join()
    assert (number, bytes(body)) == (5, payload)
    b.send(6, b"short")
    assert bytes(a.receive()[1]) == b"short"
    a.close()
    with pytest.raises(LinkClosedError):
        b.receive()
    b.close()


def test_a_link_waits_until_its_deadline() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a, b = Link(ours), Link(theirs)
    a.limit_waits(0.1)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        a.receive(started + 0.12)
    assert 0.12 <= time.monotonic() - started < 1
    with pytest.raises(TimeoutError):
        a.receive(started)
    with pytest.raises(BlockingIOError):
        send_until_full(a)
    a.close()
    b.close()


def send_until_full(link: Link) -> None:
    for number in range(100_000):
        link.send(number, b"nobody reads")


def test_a_link_knows_when_the_other_side_is_gone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a, b = Link(ours), Link(theirs)
    assert not a.gone()
    b.send(1, b"unread")
    assert not a.gone()
    b.close()
    assert a.receive()[0] == 1
    assert a.gone()
    with pytest.raises(LinkClosedError):
        a.receive()
    with pytest.raises(LinkClosedError):
        a.send(2, b"")
    a.close()
    a.close()
    assert a.gone()
