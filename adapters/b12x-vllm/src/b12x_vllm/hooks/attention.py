"""vLLM's own attention layer for a conformance case: its selector, cache specification, allocation and metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from b12x_core.adapters import AttentionCase, AttentionLayer
from torch import nn

from b12x_vllm.hooks.context import forward_context, layer_context

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

_NAME = "model.layers.0.self_attn.attn"


def cannot_express(case: AttentionCase) -> str | None:
    """Why vLLM cannot build the layer, None if it can."""
    if case.page_size % 16 or case.page_size & (case.page_size - 1) or case.page_size > 1024:
        return f"attention backend B12X offers vLLM pages of 16, 32, ... 1024 tokens; the case has {case.page_size}"
    return None


def build(case: AttentionCase) -> AttentionLayer:
    """Build the layer and its cache; see `VllmAttention`."""
    return VllmAttention(case)


class VllmAttention:
    """vLLM's `Attention` module with a KV cache of its own, driven as vLLM's model runner drives it.

    Args:
        case: what to build.
    """

    def __init__(self, case: AttentionCase) -> None:
        from vllm.config import CacheConfig
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size

        # Without a model, vLLM has nothing to derive "auto" from.
        stored = str(case.dtype).removeprefix("torch.") if case.kv_dtype == "auto" else case.kv_dtype
        cache = CacheConfig(block_size=case.page_size, cache_dtype=stored)
        sinks = None if case.sinks is None else nn.Parameter(case.sinks.to(case.device), requires_grad=False)
        with layer_context(case.dtype, case.device, cache_config=cache) as config:
            layer = Attention(
                case.num_heads,
                case.head_dim,
                case.head_dim**-0.5 if case.scale is None else case.scale,
                num_kv_heads=case.num_kv_heads,
                cache_config=cache,
                logits_soft_cap=case.soft_cap,
                per_layer_sliding_window=case.window,
                prefix=_NAME,
                head_size_v=case.v_head_dim,
                **({} if sinks is None else {"sinks": sinks}),
            )
            layer.process_weights_after_loading(case.dtype)
            # What a checkpoint's k_scale and v_scale end up in.
            layer._k_scale.fill_(case.k_scale)
            layer._v_scale.fill_(case.v_scale)

            backend = layer.get_attn_backend()
            spec = customize_attention_spec(backend, layer.get_kv_cache_spec(config))
            page_size = select_common_block_size(spec.block_size, [backend], [spec])
            if (spec.block_size, page_size) != (case.page_size, case.page_size):
                raise RuntimeError(
                    f"asked vLLM for pages of {case.page_size} tokens, got {spec.block_size}/{page_size}"
                )
            layer.kv_cache = _allocate(case, spec, backend.supported_kv_cache_layouts()[0])
            builder = backend.get_builder_cls()(spec, [_NAME], config, torch.device(case.device))
        self._case, self._config, self._layer, self._builder = case, config, layer, builder

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store k (T, Hkv, D) and v (T, Hkv, Dv) at slots (T,) int64; -1 is skipped."""
        from vllm.model_executor.layers.attention.attention import unified_kv_cache_update

        with forward_context(self._config, k.shape[0], slot_mapping={_NAME: slot_mapping}):
            unified_kv_cache_update(k, v, _NAME)

    def run(
        self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """Attend q (T, H, D) to the stored keys through the module's forward: (T, H, Dv)."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = query_start_loc.cpu()
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            num_reqs=seq_lens.shape[0],
            num_actual_tokens=q.shape[0],
            max_query_len=int(starts.diff().max()) if seq_lens.shape[0] else 0,
            max_seq_len=int(seq_lens.max()) if seq_lens.shape[0] else 0,
            block_table_tensor=block_table,
            slot_mapping=torch.full((q.shape[0],), -1, dtype=torch.int64, device=q.device),
        )
        metadata = self._builder.build(0, common)
        layer = self._layer
        # The keys were written before; without a slot mapping for the layer these are ignored.
        k = q.new_zeros(q.shape[0], layer.num_kv_heads * layer.head_size)
        v = q.new_zeros(q.shape[0], layer.num_kv_heads * layer.head_size_v)
        with forward_context(self._config, q.shape[0], attn_metadata={_NAME: metadata}, slot_mapping={}):
            out: torch.Tensor = layer(q.flatten(1), k, v)
        return out.view(-1, layer.num_heads, layer.head_size_v)


def _allocate(case: AttentionCase, spec: AttentionSpec, layout: KVCacheLayout) -> torch.Tensor:
    """The cache of one layer, allocated and viewed by vLLM: [pages, H, N, C] as the backend specified it."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.worker.utils import allocate_kv_cache

    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * case.num_pages, layers=[_NAME], layer_stride=page * case.num_pages, block_stride=page
    )
    config = KVCacheConfig(
        num_blocks=case.num_pages, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec([_NAME], spec)]
    )
    caches: dict[str, torch.Tensor] = allocate_kv_cache(config, torch.device(case.device), layout)
    return caches[_NAME]
