"""The StageListener: answers the KVCacheManagers' requests for one pipeline stage, on the stage's tp_rank 0."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from kvlaunch.kv.ipc import wire
from kvlaunch.kv.ipc.far import FarLink
from kvlaunch.kv.ipc.links import Link, LinkClosedError, claim_path, listen_seqpacket, peer_uid
from kvlaunch.kv.ipc.messages import (
    Done,
    Failed,
    HelloRequester,
    Map,
    Ping,
    Pong,
    Refused,
    Reply,
    SetLimit,
    StageState,
    State,
    Undo,
    Unmap,
    Welcome,
)
from kvlaunch.kv.ipc.network import NetworkServer, serve
from kvlaunch.kv.ipc.roles import stage_role
from kvlaunch.kv.ipc.stage import Stage
from kvlaunch.kv.rank import RankMemory
from kvlaunch.secret import Secret

log = logging.getLogger(__name__)

_SENDERS_REMEMBERED = 64
_HELLO_TIMEOUT_S = 1.0
_IPC = "ipc://"


class StageListener:
    """Threads: one serves requests that come by ZeroMQ (ROUTER), one takes in those who connect to the stage's own
    socket (SOCK_SEQPACKET), and one serves each requester that came that way. Two more with `network`.

    Requests are served one after the other. The last operation of each sender is remembered with its reply, so one
    that is repeated because the reply was lost is answered and not applied again. Bytes that are no request are
    answered with Refused; messages over 1 MiB end their connection, which its owner makes anew.

    Args:
        rank: this process's memory (tp_rank 0 of the stage). Not closed here.
        endpoint: `ipc://<path>`.
        peer_path: socket on which the peers join, and on which requesters of this host may come.
        peers: global ranks of the stage's other members.
        peer_timeout_s: seconds that an operation may take inside the stage, taking back included. Make it at most half
            of the requesters' deadline, so that they learn which rank it was.
        on_limit: called with the new limit (pages, or None) for SetLimit; a ValueError that it raises refuses the
            limit. Without it such requests are refused.
        commits: False refuses Map, Unmap and Undo: the ranks have managers of their own.
        network: `tcp://HOST:PORT` where requesters of other hosts are served too, HOST an address of this host that
            they reach, port 0 for any. They must know the secret.
        secret: of the run, for `network` and `reach`.

    Raises:
        ConfigError: `network` without a secret.
    """

    def __init__(
        self,
        rank: RankMemory,
        *,
        endpoint: str,
        peer_path: Path,
        peers: Sequence[int],
        peer_timeout_s: float = 2.0,
        on_limit: Callable[[int | None], None] | None = None,
        commits: bool = True,
        network: str | None = None,
        secret: Secret | None = None,
    ) -> None:
        if not endpoint.startswith(_IPC):
            raise ValueError(f"endpoint {endpoint!r}: must be {_IPC}<path>")
        self._rank = rank
        self._endpoint = endpoint
        self._socket_path = Path(endpoint.removeprefix(_IPC))
        if not self._socket_path.is_absolute():
            raise ValueError(f"endpoint {endpoint!r}: the path must be absolute")
        self._peer_path = peer_path
        self._peers = tuple(peers)
        self._on_limit = on_limit
        self._commits = commits
        self._secret = secret
        self._stage = Stage(rank, peers=peers, timeout_s=peer_timeout_s)
        self._requesters: list[tuple[Link, threading.Thread]] = []
        self._serving = threading.Lock()
        self._replies: dict[str, tuple[int, bytes]] = {}
        self._asked: tuple[tuple[str, int], StageState | Failed] | None = None
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._server: socket.socket | None = None
        self._network: NetworkServer | None = None
        if network is not None:
            self._network = NetworkServer(
                network,
                secret=secret,
                run=rank.run,
                role=stage_role(rank.pp_rank),
                answer=self._answer,
                name=f"kvlaunch-stage{rank.pp_rank}",
            )
        self._threads: list[threading.Thread] = []

    @property
    def network_endpoint(self) -> str | None:
        """Where requesters of other hosts are served, with address and port once started; None: nowhere."""
        return self._network.endpoint if self._network is not None else None

    def start(self) -> None:
        """Bind all sockets and serve. What a dead process left at their paths is replaced.

        Raises:
            OSError: somebody listens there already, or the path or address cannot be used.
        """
        claim_path(self._socket_path, socket.SOCK_STREAM)
        self._server = listen_seqpacket(self._peer_path, len(self._peers) + 8)
        try:
            self._context, router = self._bind()
        except zmq.ZMQError as error:
            self._close_server()
            raise OSError(error.errno, f"cannot bind {self._endpoint}: {error.strerror}") from error
        if self._network is not None:
            try:
                self._network.start()
            except OSError:
                router.close()
                self.close()
                raise
        name = f"kvlaunch-stage{self._rank.pp_rank}"
        self._threads = [
            threading.Thread(target=serve, args=(router, self._answer), name=name, daemon=True),
            threading.Thread(target=self._admit_all, args=(self._server,), name=f"{name}-join", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def reach(self, global_rank: int, endpoint: str) -> None:
        """Join a peer on another host, whose FarPeer serves at `tcp://HOST:PORT`.

        Raises:
            ConfigError: there is no secret.
            OSError: the host's name is not known.
            ValueError: not such an endpoint, or not a rank of this stage.
        """
        refusal = self._stage.refusal(global_rank)
        if refusal is not None:
            raise ValueError(refusal)
        self._stage.join(global_rank, FarLink(global_rank, endpoint, secret=self._secret, run=self._rank.run))

    def wait_ready(self, timeout: float) -> None:
        """Wait until every peer has joined.

        Raises:
            KVCommitError: names those that have not within `timeout` seconds.
        """
        self._stage.wait_ready(timeout)

    def close(self) -> None:
        """End all threads and remove the sockets. May be called twice. An operation under way is given up."""
        self._closing.set()
        self._close_server()
        self._stage.close()
        if self._network is not None:
            self._network.close()
        if self._context is not None:
            self._context.term()  # ends the serving thread's wait, and waits for it to close its socket
            self._context = None
            self._socket_path.unlink(missing_ok=True)
        for thread in self._threads:
            thread.join()
        self._stage.close()  # a peer may have joined meanwhile
        for link, thread in self._requesters:
            link.close()
            thread.join()
        self._requesters = []

    def _bind(self) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
        try:
            router.bind(self._endpoint)
            self._socket_path.chmod(0o600)
        except (zmq.ZMQError, OSError):
            router.close()
            context.term()
            raise
        return context, router

    def _close_server(self) -> None:
        if self._server is not None:
            # shutdown wakes the thread that waits in accept; close alone would leave it there
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
            self._server = None
            self._peer_path.unlink(missing_ok=True)

    def _serve_requester(self, link: Link) -> None:
        try:
            while True:
                number, raw = link.receive()
                link.send(number, self._answer(bytes(raw)))
        except OSError as error:
            if not isinstance(error, LinkClosedError) and not self._closing.is_set():
                log.warning("the connection to a requester of stage %d broke: %s", self._rank.pp_rank, error)
        finally:
            link.close()

    def _answer(self, raw: bytes) -> bytes:
        try:
            request = wire.decode_request(raw)
        except wire.DecodeError as error:
            return wire.encode(Refused(seq=-1, reason=f"not a request: {error}"))
        rank = self._rank
        if request.run != rank.run or request.epoch != rank.epoch:
            reason = (
                f"stage {rank.pp_rank} here belongs to run {rank.run} epoch {rank.epoch}, the request to run"
                f" {request.run} epoch {request.epoch}"
            )
            return wire.encode(Refused(seq=request.seq, reason=reason))
        if isinstance(request, Ping):
            return wire.encode(Pong(seq=request.seq, global_rank=rank.global_rank, pid=os.getpid()))
        with self._serving:
            if isinstance(request, State | SetLimit):
                return wire.encode(self._inform(request, raw))
            if not self._commits:
                reason = f"the ranks of stage {rank.pp_rank} map and unmap by themselves"
                return wire.encode(Refused(seq=request.seq, reason=reason))
            return self._operate(request, raw)

    def _operate(self, request: Map | Unmap | Undo, raw: bytes) -> bytes:
        last = self._replies.get(request.sender)
        if last is not None and request.seq <= last[0]:
            if request.seq == last[0]:
                return last[1]
            reason = f"operation {request.seq} came after {last[0]} of the same sender"
            return wire.encode(Refused(seq=request.seq, reason=reason))
        reply = wire.encode(self._stage.commit(request, raw))
        if last is None and len(self._replies) >= _SENDERS_REMEMBERED:
            del self._replies[next(iter(self._replies))]
        self._replies[request.sender] = (request.seq, reply)
        return reply

    def _inform(self, request: State | SetLimit, raw: bytes) -> Reply:
        if isinstance(request, State):
            # One that is repeated because a rank does not answer must not be waited for again: others are in line.
            if self._asked is None or self._asked[0] != (request.sender, request.seq):
                self._asked = ((request.sender, request.seq), self._stage.state(request, raw))
            return self._asked[1]
        if self._on_limit is None:
            return Refused(seq=request.seq, reason="no manager lives here whose limit could be set")
        try:
            self._on_limit(request.pages)
        except ValueError as error:
            return Refused(seq=request.seq, reason=str(error))
        return Done(seq=request.seq)

    def _admit_all(self, server: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = server.accept()
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("a KV peer could not be accepted: %s", error)
                    self._closing.wait(0.1)
                continue
            error_text = self._admit(sock)
            if error_text is not None:
                log.warning("a process that wanted to join stage %d was refused: %s", self._rank.pp_rank, error_text)

    def _take_requester(self, link: Link) -> None:
        self._requesters = [(other, thread) for other, thread in self._requesters if thread.is_alive()]
        name = f"kvlaunch-stage{self._rank.pp_rank}-request"
        thread = threading.Thread(target=self._serve_requester, args=(link,), name=name, daemon=True)
        self._requesters.append((link, thread))
        thread.start()

    def _admit(self, sock: socket.socket) -> str | None:
        """Take one peer in, or close its connection; the reason why it was refused."""
        link = Link(sock)
        if peer_uid(sock) != os.getuid():
            link.close()
            return "it belongs to another user"
        try:
            sock.settimeout(_HELLO_TIMEOUT_S)
            exchange, raw = link.receive()
            hello = wire.decode_hello(raw)
            sock.settimeout(None)
            if isinstance(hello, HelloRequester):
                link.send(exchange, wire.encode(Welcome()))
                self._take_requester(link)
                return None
            if hello.run != self._rank.run or hello.epoch != self._rank.epoch:
                error: str | None = f"rank {hello.global_rank} belongs to run {hello.run} epoch {hello.epoch}"
            else:
                error = self._stage.refusal(hello.global_rank)
            # Welcome goes out before the first request can: only join publishes the link.
            link.send(exchange, wire.encode(Welcome(error=error)))
        except (LinkClosedError, TimeoutError, wire.DecodeError) as problem:
            link.close()
            return str(problem) or type(problem).__name__
        if error is not None:
            link.close()
            return error
        self._stage.join(hello.global_rank, link)
        return None
