"""Writing keys and values into a paged cache, in plain torch."""

from __future__ import annotations

import torch

from b12x_core.reference.codecs import FP8_DTYPE, encode_fp8
from b12x_core.reference.quantize import divide

_ELEMENT = {dtype: element for element, dtype in FP8_DTYPE.items()}


def write_tokens(
    tokens: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Write (T, Hkv, D) to the slots of a (pages, page_size, Hkv, D) cache; FP8 stores tokens / scale, saturated."""
    page_size = cache.shape[1]
    live = slot_mapping >= 0
    slots = slot_mapping[live]
    values = tokens[: slot_mapping.shape[0]][live]
    element = _ELEMENT.get(cache.dtype)
    if element is not None:
        wide = values.float() if scale is None else divide(values.float(), scale.float().reshape(-1, 1))
        values = encode_fp8(wide, element)
    pages, offsets = slots // page_size, slots % page_size
    if element is not None:
        # torch has no indexed store for FP8 dtypes on every device; the bytes are the same.
        cache.view(torch.uint8)[pages, offsets] = values.view(torch.uint8)
    else:
        cache[pages, offsets] = values.to(cache.dtype)
