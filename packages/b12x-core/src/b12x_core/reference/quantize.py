"""Quantizing activations, and dequantizing any stored matrix.

One rule a format, x being an (M, K) matrix in float32 and a block the elements that share a scale:

==========  =======================================================  ==========================
format      scale of a block                                         element
==========  =======================================================  ==========================
fp8-tensor  given, or the largest magnitude / 448                    e4m3(x / scale)
fp8-row     largest magnitude of the row / 448                       e4m3(x / scale)
fp8-group   largest magnitude of 128 along K / 448                   e4m3(x / scale)
mxfp8       largest magnitude of 32 / 448, up to a power of two      e4m3(x / scale)
mxfp4       largest magnitude of 32 / 6, up to a power of two        e2m1(x / scale)
nvfp4       e4m3(largest magnitude of 16 / 6 / global scale)         e2m1(x / (scale * global))
==========  =======================================================  ==========================

Elements round to nearest even and saturate. A block whose scale is 0 holds zeros: nothing divides by 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from b12x_core.formats import ALL, Element, Format, ScaleType
from b12x_core.reference.codecs import decode_e2m1, decode_e8m0, decode_fp8, encode_e2m1, encode_e8m0_up, encode_fp8


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized (..., K) tensor.

    Attributes:
        format: how it is stored.
        data: e4m3 (..., K), or uint8 (..., K/2) for e2m1.
        scale: fp32, e4m3 or e8m0 by the format, shape `Format.scale_shape` with the leading dimensions of data.
        global_scale: float32 scalar multiplier, nvfp4 only.
    """

    format: Format
    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None


def divide(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, values / scale)


def _over(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Amax / largest, rounded once. By a plain number torch divides on CUDA as it multiplies with the reciprocal."""
    return amax / torch.full_like(amax, largest)


def _scaled(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """(..., rows, k) times float32 block scales (..., R, C), each over its block; blocks at the edge are smaller."""
    rows, k = values.shape[-2:]
    if block[0] not in (ALL, 1):
        scale = scale.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    if block[1] in (ALL, 1):
        return values * scale
    if k % block[1] == 0:
        blocks = values.view(*values.shape[:-1], k // block[1], block[1])
        return (blocks * scale.unsqueeze(-1)).flatten(-2)
    return values * scale.repeat_interleave(block[1], dim=-1)[..., :k]


def quantize(x: torch.Tensor, fmt: Format, static_scale: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize (..., K) along K.

    Args:
        x: bf16, fp16 or fp32.
        fmt: an activation format of the table above.
        static_scale: float32 scalar; the scale of fp8-tensor (None: dynamic), the global scale of nvfp4.
    """
    values = x.float()
    k = values.shape[-1]
    largest = fmt.element.largest
    if fmt.block == (ALL, ALL):
        amax = values.abs().amax() if values.numel() else values.new_zeros(())
        scale = (_over(amax, largest) if static_scale is None else static_scale.float()).reshape(1)
        return QuantizedTensor(fmt, encode_fp8(divide(values, scale), fmt.element), scale)
    assert fmt.block is not None
    width = fmt.block[1] or k
    padded = torch.nn.functional.pad(values, (0, -k % width))  # a block at the edge is smaller; zeros do not count
    amax = padded.unflatten(-1, (-1, width)).abs().amax(-1)
    if fmt.scale is ScaleType.E4M3:
        assert static_scale is not None
        global_scale = static_scale.float().reshape(())
        scale = encode_fp8(divide(_over(amax, largest), global_scale), Element.E4M3)
        step = scale.float() * global_scale
        wide = divide(values, step.repeat_interleave(width, dim=-1))
        return QuantizedTensor(fmt, encode_e2m1(wide), scale, global_scale)
    if fmt.scale is ScaleType.E8M0:
        scale = encode_e8m0_up(_over(amax, largest))
        step = decode_e8m0(scale)
    else:
        scale = step = _over(amax, largest)
    wide = divide(values, step.repeat_interleave(width, dim=-1)[..., :k])
    data = encode_e2m1(wide) if fmt.element is Element.E2M1 else encode_fp8(wide, fmt.element)
    return QuantizedTensor(fmt, data, scale.squeeze(-1) if fmt.block[1] == ALL else scale)


def dequantize(
    data: torch.Tensor, fmt: Format, scale: torch.Tensor | None, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Stored (..., rows, K) matrices -> float32.

    Args:
        data: elements; e2m1 packed two a byte.
        scale: block scales, shape `Format.scale_shape` after the leading dimensions; () or (1,) for one a matrix.
        global_scale: float32, broadcastable against (..., rows, 1).
    """
    if fmt.scale is None or fmt.block is None:
        return data.float()
    assert scale is not None
    values = decode_e2m1(data) if fmt.element is Element.E2M1 else decode_fp8(data)
    factor = decode_e8m0(scale) if fmt.scale is ScaleType.E8M0 else scale.float()
    if fmt.block == (ALL, ALL):
        factor = factor.reshape(*values.shape[:-2], 1, 1)
    elif fmt.block[1] == ALL:
        factor = factor.unsqueeze(-1)
    return _scaled(values, factor if global_scale is None else factor * global_scale, fmt.block)


def dequantize_activation(q: QuantizedTensor) -> torch.Tensor:
    """A quantized activation (..., K) -> float32."""
    if q.format.block == (ALL, ALL):
        return q.data.float() * q.scale
    return dequantize(q.data, q.format, q.scale, q.global_scale)


def as_activation(x: torch.Tensor, fmt: Format, static_scale: torch.Tensor | None = None) -> torch.Tensor:
    """What a GEMM of that activation format sees of x, in float32: x itself, or x quantized and dequantized."""
    if not fmt.quantized:
        return x.float()
    return dequantize_activation(quantize(x, fmt, static_scale))
