"""The worker side of the elastic KV cache: a reserved region in place of vLLM's buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlaunch.engines.rank_kv import RankKV
from kvlaunch.engines.vllm import compat
from kvlaunch.env import RunEnv
from kvlaunch.errors import CompatibilityError
from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.plan.types import LaunchPlan, RankPlan

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerHooks:
    """What one worker process of a run carries beside vLLM's own."""

    def __init__(self, run: RunEnv, plan: LaunchPlan, rank: RankPlan) -> None:
        self._plan = plan
        self._rank = rank
        self._kv = RankKV(run, plan, rank, commits=True)

    def install(self) -> None:
        from vllm.v1.worker import gpu_model_runner, gpu_worker
        from vllm.v1.worker.gpu import attn_utils

        load_model = compat.seam(gpu_worker.Worker, "load_model")

        def load_model_and_tell(worker: Any, *args: Any, **kwargs: Any) -> None:
            load_model(worker, *args, **kwargs)
            self._kv.weights_loaded()

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
        buffer = self._kv.reserve(self._geometry(config))
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
        self._kv.tell_memory()
        return caches

    def close(self) -> None:
        self._kv.close()

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
