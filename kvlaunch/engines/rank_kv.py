"""The KV memory of one rank inside an engine: reserved address space, and the listener or peer that speaks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvlaunch.engines import faults, ranks
from kvlaunch.env import RunEnv
from kvlaunch.events import Phase, emit
from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.kv.ipc import network
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.peer import FarPeer, StagePeer
from kvlaunch.kv.ipc.roles import rank_role, stage_role
from kvlaunch.kv.memory.base import MemoryBackend, Region
from kvlaunch.kv.memory.host import HostBackend
from kvlaunch.kv.rank import RankMemory
from kvlaunch.kv.settings import KVSettings
from kvlaunch.launch import listeners
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.address import joined_endpoint
from kvlaunch.plan.types import KVPlan, LaunchPlan, RankPlan
from kvlaunch.secret import load_secret

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvlaunch.rank")

CONNECT_TIMEOUT_S = 60.0
"""Ranks of a stage reserve their memory within seconds of each other; a slow machine gets a minute."""


IDLE_S = 0.5
"""Seconds without an allocation after which pages mapped ahead go back."""


def settings_of(kv: KVPlan, fault: str, *, limit_binds: bool = True) -> KVSettings:
    """What the plan says to a KVCacheManager."""
    return KVSettings(
        num_blocks=kv.num_blocks,
        blocks_per_page=kv.blocks_per_page,
        ahead_low=kv.ahead_low,
        ahead_high=kv.ahead_high,
        commit_timeout_s=kv.commit_timeout_s,
        limit_binds=limit_binds,
        idle_s=0.0 if faults.unmaps_eagerly(fault) else IDLE_S,
    )


class RankKV:
    """Reserves a rank's region, and tells the run about the rank's progress.

    Args:
        on_limit: called by the listener, in a thread of its own, with a new limit (pages, or None), where this rank's
            process is the one that can set it.
        commits: whether the stage's listener takes Map and Unmap, for a manager elsewhere. False: the rank's own
            manager maps and unmaps, and the listener only says what is mapped.
    """

    def __init__(
        self,
        run: RunEnv,
        plan: LaunchPlan,
        rank: RankPlan,
        *,
        commits: bool,
        on_limit: Callable[[int | None], None] | None = None,
    ) -> None:
        self.run = run
        self.plan = plan
        self.rank = rank
        self.faults = faults.faults_of(run.fault, rank)
        self.memory: RankMemory | None = None
        self._commits = commits
        self._on_limit = on_limit
        self._paths = RunPaths(run.run_dir)
        self._service: StageListener | StagePeer | FarPeer | None = None

    def weights_loaded(self) -> None:
        """To be called when the rank has loaded its weights."""
        faults.raise_at(self.faults, "weights")
        self.tell("weights")

    def reserve(self, geometry: BlockGeometry, *, nbytes: int | None = None) -> torch.Tensor:
        """Reserve the region, map the null block's page, and serve the stage.

        Args:
            nbytes: of the region, where more than these blocks is to lie in it (`share`).

        Returns:
            The flat int8 tensor over the whole region.

        Raises:
            MemoryMapError: no address space, or no memory for the null block's page.
            KVCommitError: a rank of the stage did not join its leader in time.
        """
        region = self._backend().reserve(geometry.region_bytes if nbytes is None else nbytes)
        self.memory = self._memory(
            faults.forgetful(region) if faults.leaves_unmapped(self.faults) else region, geometry
        )
        self._serve(self.memory)
        log.info("KV cache: %d bytes of address space, %d pages", region.nbytes, geometry.num_pages)
        return region.tensor()

    def share(self, geometry: BlockGeometry) -> RankMemory:
        """Memory for other blocks in the region that was reserved, with pages of their own; its null page is mapped.

        Raises:
            ValueError: the blocks do not lie within the region, or not free of those that are there.
            MemoryMapError: no memory for the null block's page.
        """
        assert self.memory is not None  # `reserve` comes first
        return self._memory(self.memory.region, geometry, beside=self.memory)

    def tell(self, phase: Phase, detail: str = "") -> None:
        emit(self._paths.events, phase, rank=self.rank.global_rank, detail=detail)

    def tell_memory(self) -> None:
        """The `kv` event. Its detail is JSON: where this rank's region lies, and which listener speaks for it."""
        if self.memory is None:
            self.tell("kv")
            return
        stage = ranks.stage_of(self.plan, self.rank)
        about = {
            "address": self.memory.region.address,
            "nbytes": self.memory.region.nbytes,
            "exported": ranks.exported(),
            "listener": stage.endpoint,
            "listens": self.rank.global_rank == stage.leader,
        }
        self.tell("kv", msgspec.json.encode(about).decode())

    def limited(self, pages: int | None) -> None:
        """This rank keeps another limit from now on: for who asks for its state."""
        assert self.memory is not None  # a limit on what is not there
        self.memory.limit_pages = pages

    def close(self) -> None:
        """Stop answering. The region stays until the process ends: the engine's tensors lie in it."""
        if self._service is not None:
            self._service.close()

    def _memory(self, region: Region, geometry: BlockGeometry, beside: RankMemory | None = None) -> RankMemory:
        return RankMemory(
            region,
            geometry,
            global_rank=self.rank.global_rank,
            pp_rank=self.rank.pp_rank,
            tp_rank=self.rank.tp_rank,
            run=self.run.run,
            epoch=self.run.epoch,
            fault=faults.request_fault(self.faults),
            beside=beside,
        )

    def _backend(self) -> MemoryBackend:
        if self.plan.device == "cpu":
            return HostBackend(guard=self.plan.kv.guard)
        from kvlaunch.kv.memory.cuda import CudaBackend

        return CudaBackend(device=int(self.rank.device.rpartition(":")[2]))

    def _serve(self, memory: RankMemory) -> None:
        stage = ranks.stage_of(self.plan, self.rank)
        peer_path = self._paths.peer_socket(stage.pp_rank)
        if self.rank.global_rank == stage.leader:
            secret = load_secret(self._paths.secret, {}) if stage.network else None
            listener = StageListener(
                memory,
                endpoint=stage.endpoint,
                peer_path=peer_path,
                peers=[r for r in stage.ranks if r != stage.leader],
                peer_timeout_s=self.plan.kv.commit_timeout_s / 2,
                on_limit=self._on_limit,
                commits=self._commits,
                network=self._any_port() if stage.network else None,
                secret=secret,
            )
            self._service = listener
            listener.start()
            if listener.network_endpoint is not None:
                self._serves(stage_role(stage.pp_rank), listener.network_endpoint)
            far = listeners.far_ranks(self._paths, self.plan, stage, self.run.epoch, timeout_s=CONNECT_TIMEOUT_S)
            for rank, endpoint in far.items():
                listener.reach(rank, endpoint)
            listener.wait_ready(CONNECT_TIMEOUT_S)
        elif self.rank.node_rank != stage.node_rank:
            peer = FarPeer(memory, endpoint=self._any_port(), secret=load_secret(self._paths.secret, {}))
            self._service = peer
            peer.start()
            self._serves(rank_role(self.rank.global_rank), peer.endpoint)
        else:
            self._service = StagePeer(memory, peer_path=peer_path, connect_timeout_s=CONNECT_TIMEOUT_S)
            self._service.start()

    def _any_port(self) -> str:
        return f"{network.TCP}{joined_endpoint(self.run.local_addr, 0)}"

    def _serves(self, role: str, endpoint: str) -> None:
        """Write down where the other nodes reach it; the agent tells them."""
        listeners.save(
            self._paths.served_at(role), listeners.Listeners(epoch=self.run.epoch, endpoints={role: endpoint})
        )
