"""Listeners' endpoints through torch's store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from kvlaunch.errors import RendezvousError
from kvlaunch.kv.ipc.discovery import look_up, publish

torch_distributed = pytest.importorskip("torch.distributed")
TCPStore = torch_distributed.TCPStore
RUN = {"run": "job 7", "epoch": 0}
HERE, THERE = "tcp://10.0.0.1:4711", "tcp://[fd00::2]:4712"


@pytest.fixture
def stores() -> tuple[TCPStore, TCPStore]:
    """The store as the node that holds it sees it, and as another one does."""
    head = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    return head, TCPStore("127.0.0.1", head.port, is_master=False, timeout=timedelta(seconds=20))


def test_what_one_node_says_the_other_reads(stores: tuple[TCPStore, TCPStore]) -> None:
    publish(stores[0], **RUN, role="stage 0", endpoint=HERE)
    publish(stores[1], **RUN, role="stage 1", endpoint=THERE)
    for store in stores:
        assert look_up(store, **RUN, roles=["stage 0", "stage 1"], timeout_s=5) == {"stage 0": HERE, "stage 1": THERE}
        assert look_up(store, **RUN, roles=["stage 1"], timeout_s=5) == {"stage 1": THERE}


def test_it_waits_for_a_stage_that_comes_late(stores: tuple[TCPStore, TCPStore]) -> None:
    late = threading.Timer(0.2, publish, (stores[1],), {**RUN, "role": "stage 0", "endpoint": HERE})
    late.start()
    assert look_up(stores[0], **RUN, roles=["stage 0"], timeout_s=10) == {"stage 0": HERE}
    late.join()


def test_stages_that_do_not_appear_are_named_in_time(stores: tuple[TCPStore, TCPStore]) -> None:
    publish(stores[0], **RUN, role="stage 1", endpoint=HERE)
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"Run job 7 epoch 0: stage 0, rank 2 did not say within 0.3 s"):
        look_up(stores[1], **RUN, roles=["stage 0", "stage 1", "rank 2"], timeout_s=0.3)
    assert 0.25 < time.monotonic() - started < 3
    publish(stores[0], **RUN, role="rank 2", endpoint=HERE)
    with pytest.raises(RendezvousError, match=r"stage 0 did not say"):
        look_up(stores[1], **RUN, roles=["stage 0", "stage 1", "rank 2"], timeout_s=0)


@pytest.mark.parametrize("other", [{"run": "job 8", "epoch": 0}, {"run": "job 7", "epoch": 1}])
def test_another_run_or_epoch_has_its_own(stores: tuple[TCPStore, TCPStore], other: dict[str, object]) -> None:
    publish(stores[0], **RUN, role="stage 0", endpoint=HERE)
    with pytest.raises(RendezvousError, match="stage 0 did not say"):
        look_up(stores[0], **other, roles=["stage 0"], timeout_s=0.1)


@pytest.mark.parametrize("endpoint", ["ipc:///run/x", "tcp://h", "tcp://*:1", "tcp://h:0", "tcp://h:70000", "", "\0"])
def test_what_is_no_endpoint_is_neither_written_nor_believed(stores: tuple[TCPStore, TCPStore], endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        publish(stores[0], **RUN, role="stage 0", endpoint=endpoint)
    stores[0].set("kvlaunch/job 7/0/kv/stage 0", endpoint)
    with pytest.raises(RendezvousError, match="stage 0 did not say"):
        look_up(stores[1], **RUN, roles=["stage 0"], timeout_s=1)


def test_bytes_that_are_no_text_are_not_believed(stores: tuple[TCPStore, TCPStore]) -> None:
    stores[0].set("kvlaunch/job 7/0/kv/stage 0", b"\xff\xfe")
    with pytest.raises(RendezvousError, match="stage 0 did not say"):
        look_up(stores[1], **RUN, roles=["stage 0"], timeout_s=1)


def test_a_store_that_is_gone_is_an_error(stores: tuple[TCPStore, TCPStore]) -> None:
    class Gone:
        def fail(self, *_: object) -> bytes:
            raise torch_distributed.DistNetworkError("Connection reset by peer\nand a trace")

        set = get = wait = fail

    with pytest.raises(RendezvousError, match=r"stage 0 did not say .*\(Connection reset by peer\)"):
        look_up(Gone(), **RUN, roles=["stage 0"], timeout_s=1)
    with pytest.raises(RendezvousError, match="Stage 0 could not say where"):
        publish(Gone(), **RUN, role="stage 0", endpoint=HERE)
