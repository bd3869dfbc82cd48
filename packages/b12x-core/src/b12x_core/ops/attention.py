"""Paged attention over a KV cache: decode, verification and extend in one call."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from b12x_core import counters
from b12x_core.capabilities import Support, dtype_name, supports_attention
from b12x_core.ops import _checks
from b12x_core.ops._library import register
from b12x_core.ops.kv_cache import check_cache, check_kv_scales
from b12x_core.reference.attention import paged_attention as reference_attention


def _impl(q: torch.Tensor, k_cache: torch.Tensor, *rest: Any) -> None:
    counters.record("paged_attention", dtype_name(k_cache.dtype), k_cache)
    reference_attention(q, k_cache, *rest)


def _support(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: object) -> Support:
    return supports_attention(
        head_dim=q.shape[2],
        v_head_dim=v_cache.shape[3],
        page_size=k_cache.shape[1],
        q_dtype=q.dtype,
        kv_dtype=k_cache.dtype,
        device=q.device,
    )


_op = register(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? lse, float scale, bool causal, int? window, "
    "float? soft_cap, Tensor? sinks, Tensor? k_scale, Tensor? v_scale) -> ()",
    _impl,
    lambda *_: None,
    support=_support,
)


class _Options(TypedDict, total=False):
    scale: float | None
    causal: bool
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    out: torch.Tensor | None


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch of requests, each with its own number of new tokens, to their cached keys and values.

    The new tokens' own keys must have been written before. Query i of request r, of q_len new tokens and seq_len
    tokens in all, stands at position seq_len - q_len + i and sees the keys up to its own.

    Args:
        q: (T, H, D) bf16 or fp16, the requests' new tokens one after the other; H a multiple of Hkv.
        k_cache, v_cache: (pages, page_size, Hkv, D) and (..., Dv), q's dtype, e4m3 or e5m2, any strides with the head
            dim innermost.
        block_table: (R, W) int32: pages of each request in order; entries behind the last page are not read.
        seq_lens: (R,) int32, tokens of each request including the new ones; 0 for a padded row.
        query_start_loc: (R + 1,) int32, first row of each request in q; rows from the last entry on are padding.
        scale: softmax scale, None for D ** -0.5.
        causal: False lets every query see all keys of its request.
        window: number of keys a query sees, its own included; None for all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap), before masking.
        sinks: (H,) fp32, bf16 or fp16: a logit a head that joins the softmax and has no value.
        k_scale, v_scale: fp32, one value or (Hkv,): what stored FP8 keys and values are multiplied with; None means 1.
        return_lse: also return the logarithm of the softmax denominator.
        out: (T, H, Dv) of q's dtype to write; None allocates.

    Returns:
        out (T, H, Dv); with return_lse also (T, H) float32, natural logarithm, sink included. Rows of padding, of
        requests with seq_len 0, and of queries that see no key are 0 with LSE -inf.

    Raises:
        ArgumentError: an argument is malformed.
        UnsupportedError: nothing serves the call on q's device.
    """
    op, device = "paged_attention", k_cache.device
    check_cache(op, "k_cache", k_cache, None, None)
    kv_heads, head_dim = k_cache.shape[2:]
    check_cache(op, "v_cache", v_cache, kv_heads, None)
    if v_cache.dtype != k_cache.dtype or v_cache.shape[:2] != k_cache.shape[:2] or v_cache.device != device:
        raise _checks.fail(
            op, "v_cache", f"of the dtype, pages and page size of k_cache, {_checks.describe(k_cache)}", v_cache
        )
    _checks.tensor(op, "q", q, _checks.ACTIVATION_DTYPES, (None, None, head_dim), "(T, H, D)", device)
    tokens, heads = q.shape[:2]
    if heads % kv_heads:
        raise _checks.fail(op, "q", f"of a number of heads that is a multiple of {kv_heads} KV heads", q)
    if k_cache.dtype.itemsize > 1 and k_cache.dtype != q.dtype:
        raise _checks.fail(op, "k_cache", f"of {dtype_name(q.dtype)} like q, or FP8", k_cache)
    int32 = (torch.int32,)
    _checks.tensor(op, "seq_lens", seq_lens, int32, (None,), "(R,)", device)
    requests = seq_lens.shape[0]
    _checks.tensor(op, "block_table", block_table, int32, (requests, None), "(R, W)", device)
    _checks.tensor(op, "query_start_loc", query_start_loc, int32, (requests + 1,), "(R + 1,)", device)
    if window is not None and window < 1:
        raise _checks.fail(op, "window", "at least 1, the query's own key", window)
    if window is not None and not causal:
        raise _checks.fail(op, "window", "None where causal is False", window)
    _checks.positive(op, "soft_cap", soft_cap)
    if sinks is not None:
        dtypes = (torch.float32, *_checks.ACTIVATION_DTYPES)
        _checks.tensor(op, "sinks", sinks, dtypes, (heads,), "(H,)", device)
    k_scale, v_scale = check_kv_scales(op, k_cache, k_scale, v_scale)
    shape = (tokens, heads, v_cache.shape[3])
    if out is None:
        out = q.new_empty(shape)
    else:
        _checks.tensor(op, "out", out, (q.dtype,), shape, "(T, H, Dv)", device)
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    _op(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        head_dim**-0.5 if scale is None else scale,
        causal,
        window,
        soft_cap,
        sinks,
        k_scale,
        v_scale,
    )
    return out if lse is None else (out, lse)
