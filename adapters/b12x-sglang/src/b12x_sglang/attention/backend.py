"""The attention backend: what it refuses, its metadata in and out of graphs, and a layer's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import b12x_core
import torch
from b12x_core import UnsupportedError
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from b12x_sglang.attention.metadata import BatchMetadata, Buffers, MetadataBuilder, rows_per_request, tokens_ahead
from b12x_sglang.attention.pools import in_window_pool, paged_caches, refuse_pool, scale_tensor, window_pool
from b12x_sglang.attention.speculative import refuse_speculation
from b12x_sglang.flags import FLAG

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class B12xAttentionBackend(AttentionBackend):
    """Attention of one model's layers over its KV cache.

    Args:
        runner: SGLang's runner of the model, with its pools allocated.
        draft_step: which step of a chain that a draft model proposes, from 0; None for any other use.

    Raises:
        UnsupportedError: the configuration, the KV cache or a layer of the model is not served.
    """

    # Lengths are read on the device only.
    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: ModelRunner, draft_step: int | None = None) -> None:
        super().__init__()
        _refuse_configuration(runner)
        refuse_speculation()
        refuse_pool(runner.token_to_kv_pool, runner.dtype, runner.device)
        for module in runner.model.modules():
            if isinstance(module, RadixAttention):
                refuse_layer(module, _chunk_size(runner))
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        # SGLang's speculative workers bound their own buffers with it.
        self.max_context_len: int = runner.model_config.context_len
        self.forward_metadata: BatchMetadata | None = None
        self._page_size: int = runner.page_size
        self._window_pool = window_pool(runner.token_to_kv_pool)
        self._builder = MetadataBuilder(runner.req_to_token_pool.req_to_token, runner.page_size, self._window_pool)
        self._draft_step = draft_step
        # Graphs keep addresses, not tensors: whatever one was captured with stays.
        self._buffers: list[Buffers] = []
        self._starts: dict[tuple[int, int], torch.Tensor] = {}
        self._captured: dict[tuple[ForwardMode, int], BatchMetadata] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Metadata of a batch that runs without a graph, or between the segments of one."""
        idle = forward_batch.forward_mode.is_idle()
        self.forward_metadata = None if idle else self._builder.eager(forward_batch, self._draft_step)

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, tables_of: B12xAttentionBackend | None = None
    ) -> None:
        """Allocate what graphs of up to max_bs requests and max_num_tokens tokens read.

        Args:
            max_bs, max_num_tokens: limits of the graphs to come.
            tables_of: the backend whose part of the same graphs has filled its tables before this one's reads them;
                None for tables of its own.
        """
        if any(buffers.holds(max_bs, max_num_tokens) for buffers in self._buffers[-1:]):
            return
        buffers = self._builder.allocate(max_bs, max_num_tokens, None if tables_of is None else 0)
        self._buffers.append(buffers if tables_of is None else buffers.sharing_tables(tables_of._buffers[-1]))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose the tensors that a graph reads; it fills them itself, by `init_forward_metadata_in_graph`.

        Raises:
            UnsupportedError: the batch's mode is not one that is captured.
        """
        key = _graph_key(forward_batch)
        if in_capture:
            requests, rows = forward_batch.batch_size, rows_per_request(forward_batch)
            starts = self._starts.setdefault((requests, rows), self._builder.uniform_starts(requests, rows))
            self._captured[key] = self._buffers[-1].metadata(
                requests, requests * rows, starts, tokens_ahead(forward_batch, self._draft_step)
            )
        self.forward_metadata = self._captured[key]

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Fill the tensors from the batch's. Recorded into the graph."""
        self.forward_metadata = self._captured[_graph_key(forward_batch)]
        self._builder.fill(self.forward_metadata, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a request that pads a batch: one token, in the page that belongs to no request."""
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """As `forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Store the step's keys and values, then attend its queries to all that is stored.

        Args:
            q: (T, H * D) or (T, H, D).
            k, v: (T, Hkv, D) and (T, Hkv, Dv), not changed; None for a layer that reads another layer's cache.
            layer: SGLang's layer: sizes, scale, window, soft cap, scales of an FP8 cache.
            forward_batch: the batch that the metadata was made for.
            save_kv_cache: False where the keys and values are stored already.
            sinks: (H,) logits that join each softmax.
            options: what SGLang passes for features that are not served; None and False ask for nothing.

        Returns:
            (T, H * Dv). Rows that belong to no request are 0.

        Raises:
            UnsupportedError: an option asks for what is not served.
        """
        asked = [name for name, value in options.items() if value is not None and value is not False]
        _refuse(bool(asked), f"the option {', '.join(asked)}")
        metadata = self.forward_metadata
        if metadata is None:
            raise RuntimeError(f"attention backend {FLAG} was given a batch without init_forward_metadata")
        k_cache, v_cache = paged_caches(self.token_to_kv_pool, layer, self._page_size)
        k_scale, v_scale = scale_tensor(layer.k_scale, q.device), scale_tensor(layer.v_scale, q.device)
        table, slots = metadata.block_table, forward_batch.out_cache_loc
        if in_window_pool(self._window_pool, layer):
            table, slots = metadata.in_window_pool()
        if k is not None and v is not None and save_kv_cache:
            # Slots of padding go beyond the rows where SGLang narrowed these to the real ones.
            slots = slots[: k.shape[0]]
            b12x_core.write_kv_cache(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        shape = (queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        # Around a graph of a prefill SGLang has a place for the result already.
        given = forward_batch._attn_output
        out: torch.Tensor = b12x_core.paged_attention(
            queries,
            k_cache,
            v_cache,
            table,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale=layer.scaling,
            # SGLang counts the keys before the query's own.
            window=layer.sliding_window_size + 1 if layer.sliding_window_size >= 0 else None,
            soft_cap=layer.logit_cap or None,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out=None if given is None else given.view(shape),
        )
        return out.flatten(1)


def refuse_layer(layer: RadixAttention, chunk_size: int | None) -> None:
    """Refuse a layer that the core cannot compute.

    Args:
        layer: SGLang's layer.
        chunk_size: of the model's layers that attend within chunks only, None where that changes nothing.

    Raises:
        UnsupportedError: a feature of the layer is not served.
    """
    _refuse(layer.is_cross_attention, "cross attention")
    _refuse(layer.attn_type is not AttentionType.DECODER, f"{AttentionType(layer.attn_type).value} attention")
    _refuse(
        bool(layer.use_irope) and chunk_size is not None,
        f"attention in chunks of {chunk_size} tokens where --context-length is more",
    )
    _refuse(layer.pos_encoding_mode != "NONE", f"positions inside attention ({layer.pos_encoding_mode})")
    _refuse(
        bool(layer.logit_cap) and layer.logit_capping_method != "tanh", f"soft caps by {layer.logit_capping_method}"
    )
    _refuse((layer.xai_temperature_len or 0) > 0, "temperatures that depend on the position (xai_temperature_len)")


def _chunk_size(runner: ModelRunner) -> int | None:
    """Tokens of a chunk that some layers attend within (Llama 4), None where no sequence outgrows the first one."""
    size: int | None = runner.attention_chunk_size
    return None if size is None or runner.model_config.context_len <= size else size


def _refuse_configuration(runner: ModelRunner) -> None:
    from sglang.srt.runtime_context import get_exec, get_parallel

    parallel = get_parallel()
    _refuse(runner.use_mla_backend, "multi-head latent attention")
    _refuse(runner.model_config.is_encoder_decoder, "encoder-decoder models")
    _refuse(runner.kv_index_translator.is_translating, "a unified memory pool (--enable-unified-memory)")
    _refuse(parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1, "context parallelism")
    _refuse(get_exec().dllm.dllm_algorithm is not None, "diffusion language models")


def _refuse(present: bool, feature: str) -> None:
    if present:
        raise UnsupportedError(f"attention backend {FLAG} does not serve {feature}; choose another --attention-backend")


def _graph_key(batch: ForwardBatch) -> tuple[ForwardMode, int]:
    """Which captured metadata belongs to a batch. An idle rank replays the graph of its neighbours' decodes."""
    mode = ForwardMode.DECODE if batch.forward_mode.is_idle() else batch.forward_mode
    return mode, batch.batch_size
