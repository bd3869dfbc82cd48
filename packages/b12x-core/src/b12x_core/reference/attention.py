"""Paged attention in plain torch: one request at a time, its pages gathered, scores in float32."""

from __future__ import annotations

import torch


def _gather(
    cache: torch.Tensor, pages: torch.Tensor, first: int, length: int, scale: torch.Tensor | None
) -> torch.Tensor:
    """Keys or values first to length of one request: (length - first, Hkv, D) float32."""
    page_size = cache.shape[1]
    live = pages[first // page_size : -(-length // page_size)].long()
    # Indexing by bytes: torch lacks it for FP8 dtypes on some devices.
    stored = cache.view(torch.uint8)[live].view(cache.dtype) if cache.dtype.itemsize == 1 else cache[live]
    tokens = stored.flatten(0, 1)[first % page_size :][: length - first].float()
    return tokens if scale is None else tokens * scale.float().reshape(-1, 1)


def _visible(query: torch.Tensor, key: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """(Q, K) bool: the keys that each query sees, both given by their positions in the sequence."""
    query, key = query.unsqueeze(1), key.unsqueeze(0)
    visible = key <= query if causal else torch.ones_like(key <= query)
    return visible if window is None else visible & (key > query - window)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Writes out and lse. Arguments as in `b12x_core.paged_attention`."""
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    kv_heads = k_cache.shape[2]
    group = q.shape[1] // kv_heads
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        begin, end = starts[request], starts[request + 1]
        if end <= begin or length <= 0:
            continue
        # The last query stands at the last key. Pages that left every window may be freed: they are not touched.
        position = torch.arange(length - (end - begin), length, device=q.device)
        first = 0 if window is None else max(0, length - (end - begin) - window + 1)
        keys = _gather(k_cache, block_table[request], first, length, k_scale)
        values = _gather(v_cache, block_table[request], first, length, v_scale)
        queries = q[begin:end].float().unflatten(1, (kv_heads, group))
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        visible = _visible(position, torch.arange(first, length, device=q.device), causal, window)
        scores = scores.masked_fill(~visible, -torch.inf)
        total = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            # A query that sees no key keeps -inf: the sink alone would make 0 of it as well, and its LSE finite.
            joined = torch.logaddexp(total, sinks.float().reshape(kv_heads, group, 1))
            total = torch.where(total == -torch.inf, total, joined)
        weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(-1))
        out[begin:end] = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[begin:end] = total.flatten(0, 1).T
