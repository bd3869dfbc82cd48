"""What paged attention must return, in float64 from whole sequences: no page, no block table, no tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from b12x_conformance.oracle import codecs


@dataclass(frozen=True)
class Attended:
    """Result of `attention`.

    Attributes:
        out: (T, H, Dv) float64.
        lse: (T, H) float64 natural logarithm of the softmax denominator, sink included; -inf for a row without keys.
    """

    out: torch.Tensor
    lse: torch.Tensor


def stored(values: torch.Tensor, kv_dtype: str, scale: float) -> torch.Tensor:
    """Keys or values as the cache gives them back, float64.

    Args:
        values: (T, Hkv, D) in the activation dtype.
        kv_dtype: "auto": stored as they are; "fp8_e4m3": e4m3(values / scale) times scale.
        scale: see above.
    """
    if kv_dtype == "auto":
        return values.cpu().double()
    if kv_dtype != "fp8_e4m3":
        raise ValueError(f"stored: kv_dtype must be 'auto' or 'fp8_e4m3'; got {kv_dtype!r}")
    quotient = values.detach().cpu().float() / torch.tensor(scale, dtype=torch.float32)
    return torch.from_numpy(codecs.round_to(quotient.numpy(), codecs.E4M3)).double() * scale


def attention(
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    query_lens: Sequence[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> Attended:
    """Causal attention of a batch of requests.

    The last of a request's query tokens is its last key: query i of n sees keys up to len - n + i.

    Args:
        q: (T, H, D) query rows of all requests in turn; rows beyond the sum of `query_lens` are padding.
        keys, values: for each request (len, Hkv, D) and (len, Hkv, Dv), as `stored` gives them.
        query_lens: query rows of each request; a row that stands before the first key (in a request of len 0, every
            row) is padding.
        scale: softmax scale, None for D ** -0.5.
        window: number of keys that a query sees, its own included.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
        sinks: (H,) logits that join each softmax and have no value.
    """
    q = q.cpu().double()
    total, heads, size = q.shape
    out = torch.zeros(total, heads, values[0].shape[-1], dtype=torch.float64)
    lse = torch.full((total, heads), -torch.inf, dtype=torch.float64)
    scale = size**-0.5 if scale is None else scale
    start = 0
    for k, v, count in zip(keys, values, query_lens, strict=True):
        length, kv_heads, _ = k.shape
        k, v = k.double(), v.double()
        for i in range(count):
            row, position = start + i, length - count + i
            if position < 0:
                continue
            first = 0 if window is None else max(0, position - window + 1)
            # Query heads that share a key head are neighbours.
            query = q[row].unflatten(0, (kv_heads, heads // kv_heads))
            scores = torch.einsum("kgd,nkd->kgn", query, k[first : position + 1]).flatten(0, 1) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            logits = scores if sinks is None else torch.cat([scores, sinks.cpu().double()[:, None]], dim=1)
            lse[row] = torch.logsumexp(logits, dim=1)
            weights = torch.exp(scores - lse[row, :, None]).unflatten(0, (kv_heads, heads // kv_heads))
            out[row] = torch.einsum("kgn,nkv->kgv", weights, v[first : position + 1]).flatten(0, 1)
        start += count
    return Attended(out, lse)
