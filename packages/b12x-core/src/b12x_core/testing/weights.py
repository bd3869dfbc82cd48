"""Weights as checkpoints store them, random or telling, and what they stand for in float64."""

from __future__ import annotations

import math

import torch

from b12x_core.formats import FP8_BLOCK, Element, ScaleType, Scheme
from b12x_core.reference.codecs import decode_e2m1, decode_e8m0, decode_fp8

SHARD = 64
"""Rows of a shard with a global scale of its own."""


def random_weight(scheme: Scheme, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A stored weight and its scales, `global_scale` aside, with outputs of about unit size.

    fp32 scales are no powers of two; e4m3 and e8m0 ones are a few octaves apart; every code of e2m1 occurs.
    """
    fmt = scheme.weight
    if not fmt.quantized:
        weight = torch.randn(n, k, device=device) / k**0.5
        return weight.to(torch.float16 if fmt.name == "fp16" else torch.bfloat16), None
    if fmt.element is Element.E2M1:
        data = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
    else:
        data = (torch.randn(n, k, device=device) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = fmt.scale_shape(n, k)
    if fmt.scale is ScaleType.FP32:
        return data, (torch.rand(shape, device=device) + 1.0) / (64 * k**0.5)
    if fmt.scale is ScaleType.E4M3:
        return data, torch.randint(40, 73, shape, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn)
    middle = 127 - round(math.log2(math.sqrt(k) * (4 if fmt.element is Element.E2M1 else 64)))
    scale = torch.randint(middle - 3, middle + 3, shape, device=device, dtype=torch.uint8)
    return data, scale.view(torch.float8_e8m0fnu)


def global_scale(scheme: Scheme, n: int, k: int, device: torch.device) -> torch.Tensor | None:
    """The global scales (N,) of `random_weight`, another one for each shard; None for a format without."""
    if not scheme.weight.global_scale:
        return None
    shard = torch.arange(n, device=device) // SHARD
    return (1.0 + (shard % 7) / 8) * torch.pow(2.0, -(shard % 3)) / (4 * math.sqrt(k))


def telling_scale(scheme: Scheme, n: int, k: int, device: torch.device, spread: int = 9) -> torch.Tensor | None:
    """Scales of which each tells which block it belongs to, within `spread` octaves; e4m3 ones have all values."""
    fmt = scheme.weight
    if fmt.scale is None:
        return None
    shape = fmt.scale_shape(n, k)
    count = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    index = torch.arange(count, device=device).view(shape)
    if fmt.scale is ScaleType.FP32:
        return torch.pow(2.0, index % 9 - 4)
    if fmt.scale is ScaleType.E4M3:
        index = index * 5 % 253  # all finite ones, of both signs, zero and denormals among them
        return torch.where(index < 127, index, index + 1).to(torch.uint8).view(torch.float8_e4m3fn)
    return (127 + 4 - index % spread).to(torch.uint8).view(torch.float8_e8m0fnu)


def exact_weight(
    scheme: Scheme, data: torch.Tensor, scale: torch.Tensor | None, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The stored weight in float64."""
    fmt = scheme.weight
    if scale is None:
        return data.double()
    values = (decode_e2m1(data) if fmt.element is Element.E2M1 else decode_fp8(data)).double()
    n, k = values.shape
    factor = (decode_e8m0(scale) if fmt.scale is ScaleType.E8M0 else scale.float()).double()
    if fmt == FP8_BLOCK:
        factor = factor.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    elif factor.dim() == 2:
        factor = factor.repeat_interleave(k // factor.shape[1], 1)
    else:
        factor = factor.view(-1, 1)
    values = values * factor
    return values if global_scale is None else values * global_scale.double().view(-1, 1)


def decoded_weight(data: torch.Tensor, scale: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """What kernels multiply 16-bit activations of `dtype` with for mxfp4 and mxfp8, row factors included, in float64.

    A weight is held relative to the largest scale of its row, as a `dtype`. That rounds it where the block's scale is
    so much smaller that it becomes denormal.
    """
    stored = scale.view(torch.uint8).int()
    largest = stored.amax(1, keepdim=True)
    below = (largest - stored).repeat_interleave(32, 1)
    four = scheme.weight.element is Element.E2M1
    values = (decode_e2m1(data) if four else decode_fp8(data)).double()
    held = (values * _two_to((1 if four else 7) - below)).to(dtype).double()
    held = torch.where(below < (30 if dtype == torch.float16 else 254), held, 0.0)
    return held * _two_to(largest - (128 if four else 134))


def _two_to(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two in float64, from their bits: torch computes some otherwise, and in float32."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)
