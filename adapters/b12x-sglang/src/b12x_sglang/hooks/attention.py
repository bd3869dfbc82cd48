"""SGLang's own attention layer for a conformance case: its registry, pools, batch and layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from b12x_core.adapters import AttentionCase, AttentionLayer
from torch import nn

from b12x_sglang.flags import FLAG
from b12x_sglang.hooks.context import layer_context

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def cannot_express(case: AttentionCase) -> str | None:
    """Why SGLang cannot build the layer, None if it can."""
    if case.window == 1:
        return "SGLang has no window of a single key: it counts the keys before the query's own, and takes 0 for none"
    if case.num_pages < 2:
        return "SGLang's KV cache has a page beside those of requests, so it has at least 2 pages; the case has 1"
    return None


def build(case: AttentionCase) -> AttentionLayer:
    """Build the layer and its cache; see `SglangAttention`."""
    return SglangAttention(case)


class SglangAttention:
    """SGLang's `RadixAttention` module over an `MHATokenToKVPool`, driven as SGLang's runners drive it.

    Args:
        case: what to build.
    """

    def __init__(self, case: AttentionCase) -> None:
        with layer_context(case.dtype, case.device, page_size=case.page_size):
            from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
            from sglang.srt.layers.radix_attention import RadixAttention
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            self._layer = RadixAttention(
                case.num_heads,
                case.head_dim,
                case.head_dim**-0.5 if case.scale is None else case.scale,
                num_kv_heads=case.num_kv_heads,
                layer_id=0,
                logit_cap=case.soft_cap or 0.0,
                v_head_dim=-1 if case.v_head_dim is None else case.v_head_dim,
                sliding_window_size=-1 if case.window is None else case.window - 1,
            )
            if case.kv_dtype != "auto":
                # As for a checkpoint that has scales.
                method = BaseKVCacheMethod(quant_config=None)
                method.create_weights(self._layer)
                self._layer.k_scale.fill_(case.k_scale)
                self._layer.v_scale.fill_(case.v_scale)
                method.process_weights_after_loading(self._layer)
            self._pool = MHATokenToKVPool(
                # SGLang adds the page that belongs to no request.
                size=(case.num_pages - 1) * case.page_size,
                page_size=case.page_size,
                dtype=case.dtype if case.kv_dtype == "auto" else torch.float8_e4m3fn,
                head_num=case.num_kv_heads,
                head_dim=case.head_dim,
                v_head_dim=case.v_head_dim,
                layer_num=1,
                device=case.device,
                enable_memory_saver=False,
            )
        self._case = case
        # The model holds them, in a dtype of its choice.
        self._sinks = {} if case.sinks is None else {"sinks": nn.Parameter(case.sinks, requires_grad=False)}
        self._backend = self._create_backend(requests=1, pages=1)

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store k (T, Hkv, D) and v (T, Hkv, Dv) at slots (T,) int64; -1 is skipped. No query attends to them."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        none = torch.zeros(0, dtype=torch.int64, device=k.device)
        batch = self._batch(ForwardMode.EXTEND, none, none, slot_mapping)
        self._forward(k.new_empty(0, self._case.num_heads * self._case.head_dim), k, v, batch)

    def run(
        self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """Attend q (T, H, D) to the stored keys through the module's forward: (T, H, Dv)."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        requests, pages = block_table.shape
        table = self._backend.req_to_token_pool.req_to_token
        if table.shape[0] <= requests or table.shape[1] < pages * self._case.page_size:
            self._backend = self._create_backend(requests, pages)
            table = self._backend.req_to_token_pool.req_to_token
        offsets = torch.arange(self._case.page_size, device=q.device)
        slots = block_table[:, :, None] * self._case.page_size + offsets
        # Row 0 belongs to no request.
        table[1 : requests + 1, : pages * self._case.page_size] = slots.flatten(1)

        rows = query_start_loc.diff()
        single = q.shape[0] == requests and bool((rows == 1).all())
        batch = self._batch(ForwardMode.DECODE if single else ForwardMode.EXTEND, seq_lens, rows, None)
        # The keys were written before, as for a layer that reads another one's cache.
        out = self._forward(q.flatten(1), None, None, batch)
        return out.view(q.shape[0], self._case.num_heads, -1)

    def _create_backend(self, requests: int, pages: int) -> AttentionBackend:
        """The backend of SGLang's registry for so many requests of so many pages.

        SGLang allocates for as many as its memory allows; a case does not say how many it has before they come.
        """
        case = self._case
        with layer_context(case.dtype, case.device, page_size=case.page_size):
            from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
            from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

            requests_pool = ReqToTokenPool(
                size=requests,
                max_context_len=pages * case.page_size,
                device=case.device,
                enable_memory_saver=False,
            )
            backend: AttentionBackend = ATTENTION_BACKENDS[FLAG](
                runner(self._layer, self._pool, requests_pool, case.dtype, case.device)
            )
        return backend

    def _batch(self, mode: Any, seq_lens: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None) -> ForwardBatch:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        count = seq_lens.shape[0]
        lengths = seq_lens.long()
        return ForwardBatch(
            forward_mode=mode,
            batch_size=count,
            input_ids=None,
            req_pool_indices=torch.arange(1, count + 1, device=seq_lens.device),
            seq_lens=lengths,
            seq_lens_cpu=lengths.cpu(),
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=slots,
            extend_seq_lens=rows.int(),
        )

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        self._backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=self._backend)):
            out: torch.Tensor = self._layer(q, k, v, batch, **self._sinks)
        return out


def runner(model: nn.Module, pool: Any, requests_pool: Any, dtype: torch.dtype, device: str) -> Any:
    """What an attention backend asks of SGLang's `ModelRunner`, for a module outside a model.

    Args:
        model: holds the attention layers.
        pool, requests_pool: SGLang's KV cache and its table of requests.
        dtype: of activations.
        device: where they live.
    """
    return SimpleNamespace(
        model=model,
        token_to_kv_pool=pool,
        req_to_token_pool=requests_pool,
        page_size=pool.page_size,
        dtype=dtype,
        device=device,
        use_mla_backend=False,
        attention_chunk_size=None,
        model_config=SimpleNamespace(is_encoder_decoder=False, context_len=requests_pool.max_context_len),
        kv_index_translator=SimpleNamespace(is_translating=False),
    )
