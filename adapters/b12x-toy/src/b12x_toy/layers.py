"""The layers of the toy engine: modules that take the place of those of transformers, and its attention."""

from __future__ import annotations

from typing import Any

import b12x_core
import torch
from b12x_core import Activation, ExpertWeights, LinearWeights, UnsupportedError
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin

KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}
"""What a KV cache stores by the name that a user gives it; None for what the model computes in."""

PAGE_SIZE = 16
"""Tokens a page."""


class Linear(nn.Module):
    """A linear layer: x (..., K) -> (..., N)."""

    def __init__(self, weights: LinearWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `b12x_core.linear`."""
        return b12x_core.linear(x, self.weights)


class Experts(nn.Module):
    """The experts of a layer: x (M, H), ids and weights of the experts of each token (M, top_k) -> (M, H)."""

    def __init__(self, weights: ExpertWeights, activation: Activation) -> None:
        super().__init__()
        self.weights = weights
        self.activation = activation

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """See `b12x_core.fused_moe`."""
        return b12x_core.fused_moe(x, self.weights, topk_weights.float(), topk_ids, activation=self.activation)


class Pages(CacheLayerMixin):
    """The keys and values of one layer, in pages of any order; for transformers, of one sequence in pages 0, 1, 2...

    Args:
        num_pages, page_size: pages, and tokens a page.
        dtype: torch.float8_e4m3fn, or None for that of the keys.
        scales: `k_scale` and `v_scale` of an FP8 cache.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, num_pages: int, page_size: int, dtype: torch.dtype | None, **scales: torch.Tensor) -> None:
        super().__init__()
        self.page_size = page_size
        self._num_pages = num_pages
        self._dtype = dtype
        self._scales: dict[str, Any] = scales
        self._length = 0

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k (T, Hkv, D) and v (T, Hkv, Dv) at slots (T,) = page * page_size + offset."""
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        b12x_core.write_kv_cache(k, v, self.keys, self.values, slots, **self._scales)

    def run(
        self, q: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Attend q (T, H, D) to what is stored. See `b12x_core.paged_attention`."""
        options |= self._scales
        out: torch.Tensor = b12x_core.paged_attention(
            q, self.keys, self.values, block_table, lengths, starts, **options
        )
        return out

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pages, for heads as those of k and v."""
        pages = (self._num_pages, self.page_size)
        # Not zeroed: what was not written is not read, and a page that is never used costs no memory.
        self.keys, self.values = (
            torch.empty(*pages, *tensor.shape[1:], dtype=self._dtype or tensor.dtype, device=tensor.device)
            for tensor in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Pages, Pages]:
        """What a model of transformers calls with new keys and values (1, Hkv, T, D).

        Returns:
            What its attention function gets as keys and values: these pages.
        """
        end = self._length + key_states.shape[2]
        if end > self.get_max_length():
            raise UnsupportedError(f"the toy engine has pages for {self.get_max_length()} tokens; got {end}")
        slots = torch.arange(self._length, end, device=key_states.device)
        self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), slots)
        self._length = end
        return self, self

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number: a draft that was refused."""
        self._length -= abs(tokens_to_remove)

    def get_seq_length(self) -> int:
        """Number of tokens stored."""
        return self._length

    def get_max_length(self) -> int:
        """Number of tokens that fit."""
        return self._num_pages * self.page_size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a step sees, and the position of the first."""
        return self._length + query_length, 0


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: Pages,
    value: Pages,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as a model of transformers calls it: query (1, H, T, D) -> (1, T, H, Dv)."""
    if attention_mask is not None or query.shape[0] != 1:
        raise UnsupportedError("the toy engine attends causally, to one sequence without padding")
    q = query[0].transpose(0, 1).contiguous()
    length = key.get_seq_length()
    pages, lengths, starts = (
        torch.tensor(values, dtype=torch.int32, device=q.device)
        for values in ([range(-(-length // key.page_size))], [length], [0, len(q)])
    )
    out = key.run(q, pages, lengths, starts, scale=scaling, window=sliding_window, soft_cap=softcap, sinks=s_aux)
    return out[None], None


ATTENTION = "b12x_toy"
"""The name of `attend` for transformers. A name without a mask function gets no mask: the op needs the length only."""

AttentionInterface.register(ATTENTION, attend)
