"""What the backend reads of SGLang's KV caches: which of them are served, and a layer's keys and values in pages.

SGLang's pools hold a row of heads a token slot (or, with SGLANG_USE_HND_KVCACHE=1, a block of slots a page and head),
and a page is page_size slots in a row. A hybrid pool has a second one, with slots of its own, for layers with a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import b12x_core
import torch
from b12x_core import UnsupportedError
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from b12x_sglang.flags import FLAG

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

LAYOUTS = ("nhd", "hnd")
"""Layouts of a pool that can be viewed as pages of [slot, head, head dim] without a copy."""


def refuse_pool(pool: KVCache, q_dtype: torch.dtype, device: torch.device | str) -> None:
    """Refuse a pool that the core cannot read and write in place.

    Args:
        pool: SGLang's KV cache of a model.
        q_dtype: dtype of the model's queries.
        device: where it runs.

    Raises:
        UnsupportedError: the pool, or its head dim, page size or dtype, is not served.
    """
    for part in _parts(pool):
        # Other classes keep scales beside the tokens, or tokens that are not there.
        if type(part) is not MHATokenToKVPool or part.is_quantized_kv_cache or part.kv_cache_layout not in LAYOUTS:
            layout = getattr(part, "kv_cache_layout", "its own")
            raise UnsupportedError(
                f"attention backend {FLAG} serves plain 16-bit and FP8 KV caches; this one is a "
                f"{type(part).__name__} in {layout} layout, so choose another --kv-cache-dtype or --attention-backend"
            )
        support = b12x_core.supports_attention(
            head_dim=part.head_dim,
            v_head_dim=part.v_head_dim,
            page_size=part.page_size,
            q_dtype=q_dtype,
            kv_dtype=part.dtype,
            device=device,
        )
        if support.reason is not None:
            raise UnsupportedError(f"attention backend {FLAG}: {support.reason}")


def _parts(pool: KVCache) -> list[KVCache]:
    """The pools that hold the tokens of a pool."""
    if isinstance(pool, HybridLinearKVPool):
        return _parts(pool.full_kv_pool)
    if type(pool) is SWAKVPool:
        counted = ((pool.full_kv_pool, pool.full_layer_nums), (pool.swa_kv_pool, pool.swa_layer_nums))
        return [part for part, layers in counted if layers]
    return [pool]


def window_pool(pool: KVCache) -> SWAKVPool | None:
    """The hybrid pool whose layers with a window have slots of their own, None where all layers share theirs."""
    return pool if type(pool) is SWAKVPool and pool.swa_layer_nums else None


def in_window_pool(pool: SWAKVPool | None, layer: RadixAttention) -> bool:
    """Whether a layer's tokens are in the second pool of a hybrid one."""
    return pool is not None and bool(pool.layers_mapping[layer.layer_id][1])


def paged_caches(pool: KVCache, layer: RadixAttention, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys (pages, page_size, Hkv, D) and values (..., Dv), views of the pool's memory.

    Waits for the layer where SGLang loads its tokens from elsewhere.
    """
    keys, values = pool.get_kv_buffer(layer.layer_id)
    return (
        paged_kv_view(keys, page_size, layer.tp_k_head_num, layer.qk_head_dim),
        paged_kv_view(values, page_size, layer.tp_v_head_num, layer.v_head_dim),
    )


def scale_tensor(scale: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | None:
    """The scale of a layer's stored FP8 keys or values as the ops take it; a file of scales leaves a plain number."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=device)
