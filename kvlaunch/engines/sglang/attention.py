"""SGLang's attention on CPU, made to read a sliding window where it lies.

Where SGLang has two pools, its backend `torch_native` writes the keys and values of a layer with a sliding window to
the slots of that layer's pool, but reads them by the slots that the tokens have in the other one. These are the same
numbers while both pools hand out slots that were never used: until SGLang's own pools have been through all of them
(its tokens are wrong from then on), and hardly ever in pools that hand out slots compactly.
"""

from __future__ import annotations

from typing import Any

import torch

from kvlaunch.engines.sglang.compat import HookKind
from kvlaunch.errors import CompatibilityError

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def hooks() -> dict[str, tuple[HookKind, Any]]:
    """For `compat.hook`."""
    return {f"{BACKEND}._run_sdpa_forward_{phase}": ("before", _read_window) for phase in ("extend", "decode")}


def check(backend: Any) -> None:
    """Raises CompatibilityError for a backend of which it is not known where it reads a sliding window."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if type(backend) is not TorchNativeAttnBackend:
        raise CompatibilityError(
            f"kv=elastic serves a model with sliding-window and full attention together with the attention backend "
            f"torch_native alone yet, not with {type(backend).__name__}.",
            hint="Leave out engine.args.attention_backend, or use kv=static.",
        )


def _read_window(  # noqa: PLR0917 - the parameters are SGLang's
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *args: Any,
    sliding_window_size: int | None = None,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Slots of the pool that is read: those of the batch's requests, one row for each. A token that has left the window
    has slot 0 there, which the window's mask hides."""
    if sliding_window_size is not None and backend.use_sliding_window_kv_pool:
        rows = req_to_token[req_pool_indices, : int(seq_lens.max())]
        req_to_token = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
        req_pool_indices = torch.arange(len(rows))
    caches = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    return (backend, query, output, *caches, *args), {**kwargs, "sliding_window_size": sliding_window_size}
