"""What the agents of a run's nodes tell each other through the rendezvous store: who they are, that they live, how it
ended.

Keys lie under `kvlaunch/<run>/<epoch>/`: a generation of the engine never reads what belongs to another. What stands in
the store is not to be trusted with more than the run's end: who may command a KV listener is decided by keys (kv/ipc).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import kvlaunch
from kvlaunch.errors import RendezvousError
from kvlaunch.launch.state import FailureReport
from kvlaunch.plan.types import LaunchPlan
from kvlaunch.secret import Secret

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("kvlaunch.nodes")

LOOK_S = 0.5
"""How often a node says that it lives and looks at the others."""
TELL_S = 2.0
"""How long a node that ends may take to tell the others."""
SETTLE_S = 3.0
"""How long it waits for what the others have to say: whose failure came first decides what is reported."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it presents itself to the others."""

    host: str
    addr: str
    """By which the others reach it."""
    port: int
    """Free there: for the engine's own rendezvous, should this become node 0."""
    wish: int | None
    """node_rank as the user gave it."""
    settings: dict[str, str]
    """What must be the same on all nodes."""

    @property
    def name(self) -> str:
        return f"{self.host} ({self.addr})"


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes have agreed on: one generation of the engine."""

    epoch: int
    node_rank: int
    """This node's."""
    nodes: tuple[NodeFacts, ...]
    """By node rank."""

    @property
    def master(self) -> NodeFacts:
        return self.nodes[0]


class NodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a node's part of a generation ended, for good."""

    t: float
    """When it began, in seconds since the Unix epoch."""
    host: str
    kind: Literal["stopped", "failed", "followed"]
    """stopped: somebody asked for it there; failed: it failed there; followed: it ended because another had."""
    report: FailureReport | None = None


def settings_of(plan: LaunchPlan, secret: Secret | None) -> dict[str, str]:
    """What must be the same on all nodes, as the user knows it."""
    kv = plan.kv
    settings = {
        "kvlaunch": kvlaunch.__version__,
        "engine": plan.engine,
        "model": f"{plan.model.name} ({plan.model.architecture}, {plan.model.num_layers} layers)",
        "model.dtype": plan.model.dtype,
        "device": plan.device,
        "tp": str(plan.tp_size),
        "pp": str(plan.pp_size),
        "kv": kv.mode,
        "kv.block_size": str(kv.block_size),
        "kv.reserve": str(kv.reserve_bytes),
        "pages": f"{kv.num_blocks} blocks, {kv.blocks_per_page} a page",
        "layers": " ".join(f"{first}-{last}" for first, last in dict.fromkeys(rank.layers for rank in plan.ranks)),
    }
    if secret is not None:
        from kvlaunch.kv.ipc.curve import client_keys

        settings["secret"] = client_keys(secret, plan.run).public.decode()  # a public key, to be compared
    return settings


def meet(
    store: Store, handout: Store, *, attempt: int, group_rank: int, me: NodeFacts, nnodes: int, timeout_s: float
) -> Meeting:
    """Agree with the other nodes on a generation: its number, and who is which node.

    Args:
        store: of the run.
        handout: in which `attempt` names this generation for all its nodes and no other.
        group_rank: this node's place in the rendezvous; the node that is 0 there hands out the number.

    Raises:
        RendezvousError: a node is missing after `timeout_s` seconds, or they do not agree.
    """
    deadline = time.monotonic() + timeout_s
    key = f"kvlaunch/epoch/{attempt}"
    try:
        if group_rank == 0:
            epoch = store.add("epoch", 1) - 1
            handout.set(key, str(epoch))
        else:
            handout.wait([key], timedelta(seconds=timeout_s))
            epoch = int(handout.get(key))
        store.set(f"{epoch}/facts/{group_rank}", msgspec.json.encode(me).decode())
        keys = [f"{epoch}/facts/{i}" for i in range(nnodes)]
        try:
            store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError as error:
            there = sum(store.check([one]) for one in keys)
            raise RendezvousError(f"{there} of {nnodes} nodes came within {timeout_s:g} s.") from error
        facts = [msgspec.json.decode(store.get(one), type=NodeFacts) for one in keys]
    except RuntimeError as error:  # torch's DistError, of all kinds
        raise RendezvousError(f"The nodes lost each other while they met: {_first_line(error)}") from error
    order = _order(facts)
    _check_same([facts[i] for i in order])
    return Meeting(epoch=epoch, node_rank=order.index(group_rank), nodes=tuple(facts[i] for i in order))


def _order(facts: list[NodeFacts]) -> list[int]:
    """Places in the rendezvous by node rank: as wished, the others in the order of the rendezvous.

    Raises:
        RendezvousError: two nodes wish the same.
    """
    at: dict[int, int] = {}
    for i, node in enumerate(facts):
        if node.wish is None:
            continue
        if node.wish in at:
            raise RendezvousError(
                f"{facts[at[node.wish]].name} and {node.name} were both started with node_rank={node.wish}.",
                hint="Give each node its own, or leave node_rank out.",
            )
        at[node.wish] = i
    rest = iter(i for i in range(len(facts)) if i not in at.values())
    return [at[rank] if rank in at else next(rest) for rank in range(len(facts))]


def _check_same(nodes: list[NodeFacts]) -> None:
    """Raises RendezvousError where the nodes were not started alike."""
    first = nodes[0]
    for rank, node in enumerate(nodes[1:], start=1):
        differ = sorted(
            name
            for name in first.settings.keys() | node.settings.keys()
            if first.settings.get(name) != node.settings.get(name)
        )
        if not differ:
            continue
        parts = [
            "the secret" if name == "secret" else f"{name}: {first.settings.get(name)} and {node.settings.get(name)}"
            for name in differ
        ]
        raise RendezvousError(
            f"Node 0, {first.name}, and node {rank}, {node.name}, differ in {'; '.join(parts)}.",
            hint="Run the same command, with the same version of kvlaunch and the same secret, on every node.",
        )


class NodeLink:
    """Says that this node lives, sees whether the others do, and learns how they ended. Two threads.

    Args:
        connect: makes a connection to the store of the run; each thread has its own, since one may hang in a network
            that is cut.
        silence_s: a node, or the store, that is silent for so long counts as gone.
        url: where this node serves, once it does (node 0).
        on_end: another node has ended.
        on_silent: another node is gone (its rank).
        on_unreachable: the store is.
        on_served: node 0 serves at this URL.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        meeting: Meeting,
        *,
        silence_s: float,
        url: Callable[[], str | None],
        on_end: Callable[[NodeEnd], None],
        on_silent: Callable[[int], None],
        on_unreachable: Callable[[str], None],
        on_served: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._meeting = meeting
        self._silence_s = silence_s
        self._url = url
        self._on_end = on_end
        self._on_silent = on_silent
        self._on_unreachable = on_unreachable
        self._on_served = on_served
        self._stop = threading.Event()
        self._over = threading.Event()
        """A node has ended: the store may go with it, and is not missed."""
        self._contact = time.monotonic()
        self._trouble = ""
        self._others = [rank for rank in range(len(meeting.nodes)) if rank != meeting.node_rank]

    def start(self) -> None:
        for target, name in ((self._talk, "kvlaunch-nodes"), (self._watch, "kvlaunch-nodes-watch")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def close(self) -> None:
        """Neither thread calls back any more after its next look. They are not waited for: one may hang."""
        self._stop.set()

    def settle(self, end: NodeEnd, *, wait: bool) -> list[NodeEnd]:
        """Tell the others how this node ended.

        Args:
            wait: for what they have to say of themselves.

        Returns:
            All ends that were heard, this node's among them.
        """
        self.close()
        heard = {self._meeting.node_rank: end}
        thread = threading.Thread(
            target=self._tell_and_hear, args=(heard, end, SETTLE_S if wait else 0.0), name="kvlaunch-end", daemon=True
        )
        thread.start()
        thread.join(TELL_S + (SETTLE_S if wait else 0.0))
        return list(dict(heard).values())

    def _tell_and_hear(self, heard: dict[int, NodeEnd], end: NodeEnd, wait_s: float) -> None:
        try:
            store = self._connect()
            store.set(self._key("end", self._meeting.node_rank), msgspec.json.encode(end).decode())
            deadline = time.monotonic() + wait_s
            while len(heard) < len(self._meeting.nodes) and time.monotonic() < deadline:
                for rank in self._others:
                    if rank not in heard and (found := self._end_of(store, rank)) is not None:
                        heard[rank] = found
                time.sleep(0.05)
        except (RuntimeError, RendezvousError) as error:
            log.warning("the other nodes could not be told of the end: %s", _first_line(error))

    def _key(self, what: str, rank: int) -> str:
        return f"{self._meeting.epoch}/{what}/{rank}"

    def _end_of(self, store: Store, rank: int) -> NodeEnd | None:
        key = self._key("end", rank)
        return msgspec.json.decode(store.get(key), type=NodeEnd) if store.check([key]) else None

    def _talk(self) -> None:
        beats = {rank: (b"", time.monotonic()) for rank in self._others}
        count, served, said = 0, False, False
        store: Store | None = None
        while not self._stop.wait(LOOK_S if count else 0.0):
            count += 1
            try:
                store = store or self._connect()
                store.set(self._key("beat", self._meeting.node_rank), str(count))
                said = said or self._say_url(store)
                served = served or self._hear_url(store)
                for rank in self._others:
                    if (end := self._end_of(store, rank)) is not None:
                        self._over.set()
                        self._call(self._on_end, end)
                        return
                    self._look_at(store, rank, beats)
            except (RuntimeError, RendezvousError) as error:
                store, self._trouble = None, _first_line(error)
                continue
            self._contact, self._trouble = time.monotonic(), ""

    def _look_at(self, store: Store, rank: int, beats: dict[int, tuple[bytes, float]]) -> None:
        key, now = self._key("beat", rank), time.monotonic()
        beat = store.get(key) if store.check([key]) else b""
        if beat != beats[rank][0]:
            beats[rank] = (beat, now)
        elif now - beats[rank][1] > self._silence_s:
            beats[rank] = (beat, now)
            self._call(self._on_silent, rank)

    def _say_url(self, store: Store) -> bool:
        url = self._url() if self._meeting.node_rank == 0 else None
        if url is None:
            return False
        store.set(self._key("served", 0), url)
        return True

    def _hear_url(self, store: Store) -> bool:
        key = self._key("served", 0)
        if self._meeting.node_rank == 0 or not store.check([key]):
            return False
        self._call(self._on_served, store.get(key).decode())
        return True

    def _watch(self) -> None:
        """The other thread may hang in the store's socket, where the network is cut."""
        while not self._stop.wait(LOOK_S) and not self._over.is_set():
            silent_s = time.monotonic() - self._contact
            if silent_s > self._silence_s:
                why = f": {self._trouble}" if self._trouble else ""
                self._call(self._on_unreachable, f"has not answered for {silent_s:.0f} s{why}")
                return

    def _call(self, what: Callable[[Any], None], value: object) -> None:
        if not self._stop.is_set():
            what(value)


def node_lost(meeting: Meeting, rank: int, silence_s: float) -> FailureReport:
    """The report of a node that is gone."""
    lost = meeting.nodes[rank]
    return FailureReport(
        error=RendezvousError.__name__,
        message=f"Node {rank}, {lost.name}, was lost: it has been silent for {silence_s:g} s.",
        hint="Its machine, its launcher or the network between may be down; timeouts.node_s is how long to wait.",
    )


def store_lost(endpoint: str, what: str) -> FailureReport:
    """The report of a rendezvous that cannot be reached any more."""
    return FailureReport(
        error=RendezvousError.__name__,
        message=f"The rendezvous at {endpoint} {what}.",
        hint="The node that holds it, or the network there, is down; timeouts.node_s is how long to wait.",
    )


def of_node(report: FailureReport, meeting: Meeting, host: str) -> FailureReport:
    """A failure as another node tells it: with its host, since its files are there."""
    if report.error == RendezvousError.__name__ or host == meeting.nodes[meeting.node_rank].host:
        return report
    log_path = f"{host}:{report.log_path}" if report.log_path else None
    return msgspec.structs.replace(
        report,
        message=f"On {host}: {report.message}",
        hint=f"The whole story, on that host: {report.log_path}" if report.log_path else report.hint,
        log_path=log_path,
    )


def free_port(addr: str) -> tuple[socket.socket, int]:
    """A port of this address, kept for as long as the socket is open (see ports.hold_port)."""
    from kvlaunch.launch.ports import hold_port, port_of

    held = hold_port(addr)
    return held, port_of(held)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
