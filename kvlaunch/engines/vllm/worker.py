"""The worker side of the elastic KV cache: a reserved region in place of the buffer, and its listener or peer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from kvlaunch.engines import faults, ranks
from kvlaunch.engines.vllm import compat
from kvlaunch.env import RunEnv
from kvlaunch.errors import CompatibilityError
from kvlaunch.events import Phase, emit
from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.kv.ipc.listener import StageListener
from kvlaunch.kv.ipc.peer import StagePeer
from kvlaunch.kv.memory.base import MemoryBackend, Region
from kvlaunch.kv.memory.host import HostBackend
from kvlaunch.kv.rank import RankMemory
from kvlaunch.launch.paths import RunPaths
from kvlaunch.plan.types import LaunchPlan, RankPlan

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("kvlaunch.vllm")

CONNECT_TIMEOUT_S = 60.0
"""Ranks of a stage reserve their memory within seconds of each other; a slow machine gets a minute."""


class WorkerHooks:
    """What one worker process of a run carries beside vLLM's own."""

    def __init__(self, run: RunEnv, plan: LaunchPlan, rank: RankPlan) -> None:
        self._run = run
        self._plan = plan
        self._rank = rank
        self._paths = RunPaths(run.run_dir)
        self._faults = faults.faults_of(run.fault, rank)
        self._service: StageListener | StagePeer | None = None
        self._region: Region | None = None

    def install(self) -> None:
        from vllm.v1.worker import gpu_model_runner, gpu_worker
        from vllm.v1.worker.gpu import attn_utils

        load_model = compat.seam(gpu_worker.Worker, "load_model")

        def load_model_and_tell(worker: Any, *args: Any, **kwargs: Any) -> None:
            load_model(worker, *args, **kwargs)
            faults.raise_at(self._faults, "weights")
            self._tell("weights")

        gpu_worker.Worker.load_model = load_model_and_tell
        if self._plan.kv.mode != "elastic":
            return
        for module in (gpu_model_runner, attn_utils):
            compat.seam(module, "allocate_kv_cache")
            module.allocate_kv_cache = self.allocate

    def allocate(
        self, config: KVCacheConfig, device: torch.device, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """`vllm.v1.worker.utils.allocate_kv_cache` over reserved address space.

        Returns:
            One view of shape [blocks, heads, tokens, content] a layer, as vLLM's own function does.

        Raises:
            CompatibilityError: a layout that does not fit the plan's pages.
        """
        from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, create_kv_cache_views

        if not config.kv_cache_tensors:
            return {}
        compat.refuse_unsupported_cache(config)
        self._check_rank()
        buffer = self._reserve(self._geometry(config))
        caches: dict[str, torch.Tensor] = {}
        for tensor in config.kv_cache_tensors:
            name = tensor.layers[0]
            group_id = next(i for i, group in enumerate(config.kv_cache_groups) if name in group.layer_names)
            spec = config.kv_cache_groups[group_id].kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            kernel_block_size = kernel_block_sizes[group_id] if kernel_block_sizes else None
            views = create_kv_cache_views(
                buffer, spec, config.num_blocks, layout, tensor, kernel_block_size=kernel_block_size
            )
            caches.update(zip(tensor.layers, views, strict=True))
        self._tell("kv", self._about_memory())
        return caches

    def close(self) -> None:
        """Stop answering. The region stays until the process ends: the engine's tensors lie in it."""
        if self._service is not None:
            self._service.close()

    def _check_rank(self) -> None:
        """Raises CompatibilityError where vLLM placed this rank otherwise than the plan."""
        from vllm.distributed import get_pp_group, get_tp_group

        found = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        planned = (self._rank.pp_rank, self._rank.tp_rank)
        if found != planned:
            raise CompatibilityError(
                f"vLLM made global rank {self._rank.global_rank} (stage, tp rank) {found}; the plan has {planned}."
            )

    def _geometry(self, config: KVCacheConfig) -> BlockGeometry:
        """Pages over the byte ranges that vLLM gives to blocks.

        Block b of layer l starts at offset + l * layer_stride + b * block_stride (KVCacheTensor). Layer-outermost
        layouts give a block one range a layer; block-outermost ones pack all layers of a block into one.
        """
        strips: set[tuple[int, int]] = set()
        for tensor in config.kv_cache_tensors:
            if tensor.block_stride > tensor.layer_stride:
                strips.add((0, tensor.block_stride))
                continue
            for layer in range(len(tensor.layers)):
                strips.add((tensor.offset + layer * tensor.layer_stride, tensor.block_stride))
        kv = self._plan.kv
        return BlockGeometry.from_strips(
            strips,
            num_blocks=config.num_blocks,
            blocks_per_page=kv.blocks_per_page,
            granularity=kv.granularity,
        )

    def _backend(self) -> MemoryBackend:
        if self._plan.device == "cpu":
            return HostBackend(guard=self._plan.kv.guard)
        from kvlaunch.kv.memory.cuda import CudaBackend

        return CudaBackend(device=int(self._rank.device.rpartition(":")[2]))

    def _reserve(self, geometry: BlockGeometry) -> torch.Tensor:
        region = self._backend().reserve(geometry.region_bytes)
        self._region = region
        memory = RankMemory(
            faults.forgetful(region) if faults.leaves_unmapped(self._faults) else region,
            geometry,
            global_rank=self._rank.global_rank,
            pp_rank=self._rank.pp_rank,
            tp_rank=self._rank.tp_rank,
            run=self._run.run,
            epoch=self._run.epoch,
            fault=faults.request_fault(self._faults),
        )
        stage = ranks.stage_of(self._plan, self._rank)
        peer_path = self._paths.peer_socket(stage.pp_rank)
        if self._rank.global_rank == stage.leader:
            listener = StageListener(
                memory,
                endpoint=stage.endpoint,
                peer_path=peer_path,
                peers=[r for r in stage.ranks if r != stage.leader],
                peer_timeout_s=self._plan.kv.commit_timeout_s / 2,
            )
            self._service = listener
            listener.start()
            listener.wait_ready(CONNECT_TIMEOUT_S)
        else:
            self._service = StagePeer(memory, peer_path=peer_path, connect_timeout_s=CONNECT_TIMEOUT_S)
            self._service.start()
        log.info("KV cache: %d bytes of address space, %d pages", geometry.region_bytes, geometry.num_pages)
        return region.tensor()

    def _about_memory(self) -> str:
        """JSON detail of the `kv` event: where this rank's region lies, and which listener speaks for it."""
        if self._region is None:
            return ""
        stage = ranks.stage_of(self._plan, self._rank)
        about = {
            "address": self._region.address,
            "nbytes": self._region.nbytes,
            "exported": ranks.exported(),
            "listener": stage.endpoint,
            "listens": self._rank.global_rank == stage.leader,
        }
        return msgspec.json.encode(about).decode()

    def _tell(self, phase: Phase, detail: str = "") -> None:
        emit(self._paths.events, phase, rank=self._rank.global_rank, detail=detail)
