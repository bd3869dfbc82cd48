"""Writing keys and values into a paged cache."""

from __future__ import annotations

import torch

from b12x_core import counters
from b12x_core.capabilities import KV_DTYPES, Op, Support, dtype_name, find
from b12x_core.ops import _checks
from b12x_core.ops._library import register
from b12x_core.reference.kv_cache import write_tokens


def check_cache(op: str, argument: str, cache: object, heads: int | None, dim: int | None) -> torch.Tensor:
    """Check a (pages, page_size, Hkv, D) cache of any strides whose innermost one is 1."""
    value = _checks.tensor(
        op, argument, cache, KV_DTYPES, (None, None, heads, dim), "(pages, page_size, Hkv, head dim)"
    )
    if value.stride(-1) != 1:
        raise _checks.fail(op, argument, "contiguous along the head dim", value.stride())
    return value


def check_kv_scales(
    op: str, cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check the scales of keys and values: one value or one a KV head."""
    checked = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and cache.dtype.itemsize > 1:
            scale = None  # a 16-bit cache stores what it is given; engines hand over a scale of 1 all the same
        if scale is not None:
            scale = _checks.scalar_or_rows(op, name, scale, (cache.shape[2],), "(Hkv,)", cache.device)
        checked.append(scale)
    return checked[0], checked[1]


def _impl(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    counters.record("write_kv_cache", dtype_name(k_cache.dtype), k_cache)
    write_tokens(k, k_cache, slot_mapping, k_scale)
    write_tokens(v, v_cache, slot_mapping, v_scale)


def _support(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, *_: object) -> Support:
    return find(Op.KV_CACHE, dtype_name(k_cache.dtype), k_cache.device)


_op = register(
    "write_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale) -> ()",
    _impl,
    lambda *_: None,
    support=_support,
)


def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store new keys and values at their slots.

    Args:
        k, v: (T, Hkv, D) and (T, Hkv, Dv), bf16 or fp16.
        k_cache, v_cache: (pages, page_size, Hkv, D) and (..., Dv), bf16, fp16, e4m3 or e5m2, any strides with the
            head dim innermost; written. Views of one buffer may be given as long as they do not overlap.
        slot_mapping: (T',) int32 or int64 with T' <= T: token t goes to page slot // page_size at offset
            slot % page_size; -1 is skipped. Rows of k and v beyond T' are padding.
        k_scale, v_scale: fp32, one value or (Hkv,): an FP8 cache stores k / k_scale, rounded to nearest even and
            saturated. None means 1. Ignored by a 16-bit cache.

    Raises:
        ArgumentError: an argument is malformed.
        UnsupportedError: nothing serves the call on the cache's device.
    """
    op, device = "write_kv_cache", k_cache.device
    check_cache(op, "k_cache", k_cache, None, None)
    pages, page_size, heads, head_dim = k_cache.shape
    check_cache(op, "v_cache", v_cache, heads, None)
    if v_cache.shape[:2] != k_cache.shape[:2] or v_cache.dtype != k_cache.dtype or v_cache.device != device:
        expected = (
            f"of {dtype_name(k_cache.dtype)} on {device} with pages and page size ({pages}, {page_size}) of k_cache"
        )
        raise _checks.fail(op, "v_cache", expected, v_cache)
    _checks.tensor(op, "k", k, _checks.ACTIVATION_DTYPES, (None, heads, head_dim), "(T, Hkv, D)", device)
    _checks.tensor(op, "v", v, (k.dtype,), (k.shape[0], heads, v_cache.shape[3]), "(T, Hkv, Dv)", device)
    integers = (torch.int32, torch.int64)
    _checks.tensor(op, "slot_mapping", slot_mapping, integers, (None,), "(T',)", device)
    if slot_mapping.shape[0] > k.shape[0]:
        raise _checks.fail(op, "slot_mapping", f"of at most {k.shape[0]} slots, the rows of k", slot_mapping)
    k_scale, v_scale = check_kv_scales(op, k_cache, k_scale, v_scale)
    _op(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
