"""The backend of a draft model's steps: one child for each, over the tables of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

from b12x_sglang.attention.backend import B12xAttentionBackend
from b12x_sglang.attention.pools import window_pool

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class B12xMultiStepDraftBackend(AttentionBackend):
    """Attention of the steps in which a draft model proposes a chain: in step i a request has i + 1 tokens more.

    Args:
        runner: SGLang's runner of the draft model.
        topk: branches of a proposal, 1 (more are refused by the children).
        num_steps: tokens proposed; the first is known without a step.

    Attributes:
        attn_backends: the backend of each step; SGLang runs the draft model with one after the other.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: ModelRunner, topk: int, num_steps: int) -> None:
        super().__init__()
        self._topk, self._num_steps = topk, num_steps
        self._hybrid = window_pool(runner.token_to_kv_pool) is not None
        self.attn_backends = [B12xAttentionBackend(runner, draft_step=step) for step in range(num_steps - 1)]
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Metadata of all steps without a graph."""
        for step, child in enumerate(self.attn_backends):
            child.init_forward_metadata(self._view(forward_batch, step))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate for all steps; pages are the same in each, so they have one table."""
        first, *others = self.attn_backends
        first.init_cuda_graph_state(max_bs, max_num_tokens)
        for child in others:
            child.init_cuda_graph_state(max_bs, max_num_tokens, tables_of=first)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """As `B12xAttentionBackend`, for all steps."""
        for step, child in enumerate(self.attn_backends):
            child.init_forward_metadata_out_graph(self._view(forward_batch, step), in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """As `B12xAttentionBackend`, for all steps."""
        for step, child in enumerate(self.attn_backends):
            child.init_forward_metadata_in_graph(self._view(forward_batch, step))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """As `B12xAttentionBackend`."""
        return self.attn_backends[0].get_cuda_graph_seq_len_fill_value()

    def _view(self, batch: ForwardBatch, step: int) -> Any:
        """The batch as a decode of one step. Only in a hybrid pool are the slots that it writes to looked at here."""
        view = build_inner_fb_view(batch, bs=batch.batch_size, forward_mode=ForwardMode.DECODE)
        if self._hybrid:
            slots = per_step_draft_out_cache_loc(view.out_cache_loc, batch.batch_size, self._topk, self._num_steps)
            view.out_cache_loc = slots[step]
        return view
