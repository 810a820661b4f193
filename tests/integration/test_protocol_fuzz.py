"""Whatever bytes reach a listener: it answers, applies nothing that is not its owner's, and serves on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.messages import Done, Map, Ping, Pong, Refused, SetLimit, StageState, State, Undo, Unmap
from tests.integration.network_kit import NetworkStage, RemoteRaw
from tests.integration.stage_kit import HEAD, Raw

INTS = st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**64 - 1))
RUNS = st.lists(st.tuples(INTS, INTS), max_size=6).map(tuple)
NAMES = st.one_of(st.just("r"), st.text(max_size=8))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that is well formed, with whatever in its fields."""
    head = {"run": draw(NAMES), "epoch": draw(INTS), "sender": draw(st.text(max_size=8)), "seq": draw(INTS)}
    kind: Any = draw(st.sampled_from([Map, Unmap, Undo, State, SetLimit, Ping]))
    if kind in (Map, Unmap):
        return wire.encode(kind(**head, pages=draw(RUNS)))
    if kind is Undo:
        return wire.encode(Undo(**head, of=draw(INTS)))
    return wire.encode(kind(**head, pages=draw(INTS)) if kind is SetLimit else kind(**head))


@st.composite
def bent(draw: st.DrawFn) -> bytes:
    """A request with bytes cut off, changed, put in or repeated."""
    data = bytearray(draw(requests()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["cut", "change", "insert", "double"]))
        if how == "cut":
            del data[at:]
        elif how == "change" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            data += data[at:]
    return bytes(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
ANYTHING = st.one_of(st.binary(max_size=200), JSON.map(msgspec.msgpack.encode), requests(), bent())


def could_be_the_owners(payload: bytes) -> bool:
    """An operation of this run and epoch: whoever knows the secret may order that."""
    try:
        request = wire.decode_request(payload)
    except wire.DecodeError:
        return False
    return isinstance(request, Map | Unmap | Undo) and (request.run, request.epoch) == ("r", 0)


def test_no_bytes_move_a_page_or_stop_the_listener(folder: Path) -> None:
    with NetworkStage(folder) as stage, RemoteRaw(stage.address) as far, Raw(stage.endpoint) as near:
        assert near.ask(Map(**HEAD, seq=1, pages=((1, 2),))) == Done(seq=1)
        mapped = [rank.state().mapped_pages for rank in stage.ranks]

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(payload=ANYTHING, way=st.sampled_from([far, near]))
        def attack(payload: bytes, way: Raw) -> None:
            assume(not could_be_the_owners(payload))
            reply = way.ask(payload)
            assert isinstance(reply, Refused | Pong | StageState | Done)
            if isinstance(reply, Done):  # nothing but what changes no page
                assert isinstance(wire.decode_request(payload), SetLimit)
            assert [rank.state().mapped_pages for rank in stage.ranks] == mapped

        attack()
        assert near.ask(Unmap(**HEAD, seq=2, pages=((1, 2),))) == Done(seq=2)
        assert far.ask(Ping(**HEAD, seq=3)).seq == 3


def test_the_owners_wildest_orders_leave_the_ranks_alike(folder: Path) -> None:
    """With the right run and epoch, any page numbers and any sequence numbers: applied on all ranks, or on none."""
    with NetworkStage(folder) as stage, RemoteRaw(stage.address) as far:
        seq = [0]

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(kind=st.sampled_from([Map, Unmap]), pages=RUNS, step=st.integers(-1, 2))
        def order(kind: Any, pages: tuple[tuple[int, int], ...], step: int) -> None:
            seq[0] = max(0, seq[0] + step)
            reply = far.ask(kind(**HEAD, seq=seq[0], pages=pages))
            assert reply.seq in (seq[0], -1)
            states = {rank.state().mapped_pages for rank in stage.ranks}
            assert len(states) == 1

        order()
        assert isinstance(far.ask(State(**HEAD, seq=seq[0] + 1)), StageState)
