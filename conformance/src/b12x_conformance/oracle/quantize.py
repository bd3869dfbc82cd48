"""Quantization of weights and activations by definition, one block rule for both.

Independent of the core on purpose: a test whose expectation came from the code under test would prove nothing. The
arithmetic is IEEE fp32 in the order written here, so that a result at a tie rounds the same way everywhere.

========== ======== ===================== =====================================================
format     element  elements a scale      scale
========== ======== ===================== =====================================================
fp8-tensor e4m3     the matrix            fp32, amax / 448
fp8-row    e4m3     a row                 fp32, amax / 448
fp8-block  e4m3     128 x 128             fp32, amax / 448
fp8-group  e4m3     1 x 128               fp32, amax / 448
mxfp8      e4m3     1 x 32                e8m0, amax / 448 rounded up to a power of two
mxfp4      e2m1     1 x 32                e8m0, amax / 6 rounded up to a power of two
nvfp4      e2m1     1 x 16                e4m3(amax / 6 / global), times the fp32 global scale
========== ======== ===================== =====================================================

Rounding an e8m0 scale up is the rule of the activations. Exporters of MX weights differ (the OCP text rounds down and
saturates); the weights made here round up as well, and nothing depends on it: every expectation starts from the stored
bytes. Blocks at the edge may be smaller. A block of zeros is stored as zeros and read back as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from b12x_conformance.oracle import codecs
from b12x_conformance.oracle.codecs import E2M1, E4M3, Codes, Float32

WEIGHT_FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "mxfp4", "nvfp4")
ACTIVATION_RULES = ("none", "fp8-tensor", "fp8-token", "fp8-group", "mxfp8", "mxfp4", "nvfp4")

_ALL = 0
_BLOCKS = {
    "fp8-tensor": (_ALL, _ALL),
    "fp8-channel": (1, _ALL),
    "fp8-token": (1, _ALL),
    "fp8-block": (128, 128),
    "fp8-group": (1, 128),
    "mxfp8": (1, 32),
    "mxfp4": (1, 32),
    "nvfp4": (1, 16),
}


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix, or a stack of them, in the tensors that a checkpoint stores.

    Attributes:
        format: one of `WEIGHT_FORMATS`.
        data: (..., N, K) float8_e4m3fn, or (..., N, K / 2) uint8 with two e2m1 elements a byte.
        scale: fp8-tensor float32 (...,); fp8-channel float32 (..., N, 1); fp8-block float32
            (..., ceil(N / 128), ceil(K / 128)); mxfp8 and mxfp4 uint8 e8m0 codes (..., N, K / 32); nvfp4
            float8_e4m3fn (..., N, K / 16).
        global_scale: nvfp4 only: float32 (...,) or (..., N), a multiplier of the block scales.
    """

    format: str
    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None


def quantize_weight(
    w: torch.Tensor, format: str, *, global_scale: torch.Tensor | None = None, scale_e8m0: bool = False
) -> Quantized:
    """Quantize w (..., N, K), each matrix of a stack by itself.

    Args:
        w: float32 (or any float) values.
        format: one of `WEIGHT_FORMATS`.
        global_scale: nvfp4 only: (), (...,) or (..., N); default amax / (6 * 448) of each matrix.
        scale_e8m0: fp8-block only: round the fp32 scales up to powers of two, as DeepSeek's "ue8m0" checkpoints have
            them. They are stored as float32; `.to(torch.float8_e8m0fnu)` keeps them exactly.

    Raises:
        ValueError: a format that does not exist, an option that it does not have, or a K that it cannot store.
    """
    if format not in WEIGHT_FORMATS:
        raise ValueError(f"quantize_weight: format must be one of {', '.join(WEIGHT_FORMATS)}; got {format!r}")
    if global_scale is not None and format != "nvfp4":
        raise ValueError(f"quantize_weight: a global scale belongs to nvfp4; got one with {format}")
    if scale_e8m0 and format != "fp8-block":
        raise ValueError(f"quantize_weight: scale_e8m0 belongs to fp8-block; got it with {format}")
    values = codecs.to_float32(w)
    *batch, rows, _ = values.shape
    per_row = None
    if format == "nvfp4":
        if global_scale is None:
            amax = np.abs(values).max(axis=(-2, -1), initial=0.0)
            largest = np.float32(codecs.LARGEST[E2M1] * codecs.LARGEST[E4M3])
            global_scale = torch.from_numpy(np.asarray(np.where(amax > 0, amax / largest, np.float32(1))))
        global_scale = global_scale.to(torch.float32)
        if global_scale.numel() == 1:
            global_scale = global_scale.reshape(()).expand(tuple(batch)).clone()
        per_row = _per_row(global_scale, tuple(batch), rows)
    codes, scale = _quantize(values, format, per_row, e8m0=scale_e8m0)
    if format in ("mxfp4", "nvfp4"):
        data = torch.from_numpy(codecs.pack_e2m1(codes))
    else:
        data = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    if format == "fp8-tensor":
        stored = torch.from_numpy(scale.reshape(tuple(batch)))
    elif format in ("mxfp8", "mxfp4"):
        stored = torch.from_numpy(codecs.e8m0_codes_above(scale))
    elif format == "nvfp4":
        stored = torch.from_numpy(codecs.encode(scale, E4M3)).view(torch.float8_e4m3fn)
    else:
        stored = torch.from_numpy(scale)
    return Quantized(format, data, stored, global_scale)


def dequantize(q: Quantized) -> torch.Tensor:
    """The float32 matrix (..., N, K) that q stands for: element * scale [* global scale]."""
    if q.format in ("mxfp4", "nvfp4"):
        elements = codecs.decode(codecs.unpack_e2m1(q.data.cpu().numpy()), E2M1)
    else:
        elements = codecs.to_float32(q.data)
    *batch, rows, k = elements.shape
    scale = codecs.e8m0_values(q.scale.cpu().numpy()) if q.scale.dtype == torch.uint8 else codecs.to_float32(q.scale)
    if q.format == "fp8-tensor":
        scale = scale.reshape(*batch, 1, 1)
    elif q.format == "fp8-channel":
        scale = scale.reshape(*batch, rows, 1)
    # Element times block scale is exact in fp32, so the global scale costs the only rounding.
    product = elements * _expand(scale, q.format, rows, k)
    if q.global_scale is not None:
        product = product * _per_row(q.global_scale, tuple(batch), rows)
    return torch.from_numpy(product)


def fake_quantize_activation(
    x: torch.Tensor, rule: str, input_scale: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Quantize x (..., K) by `rule` and read it back as float32.

    Args:
        x: values; all leading dimensions are rows of one matrix.
        rule: one of `ACTIVATION_RULES`.
        input_scale: the static fp32 scale (a multiplier): needed by "nvfp4", optional for "fp8-tensor" (None:
            amax / 448 of the whole of x), not taken by the others.

    Raises:
        ValueError: a rule that does not exist, or a scale that it does not take or lacks.
    """
    if rule not in ACTIVATION_RULES:
        raise ValueError(f"fake_quantize_activation: rule must be one of {', '.join(ACTIVATION_RULES)}; got {rule!r}")
    if input_scale is None and rule == "nvfp4":
        raise ValueError("fake_quantize_activation: nvfp4 needs an input scale")
    if input_scale is not None and rule not in ("nvfp4", "fp8-tensor"):
        raise ValueError(f"fake_quantize_activation: {rule} has no input scale; got {input_scale}")
    values = codecs.to_float32(x)
    if rule == "none" or values.size == 0:
        return torch.from_numpy(values)
    matrix = values.reshape(-1, values.shape[-1])
    rows, k = matrix.shape
    static = None
    if input_scale is not None:
        static = np.float32(input_scale.item() if isinstance(input_scale, torch.Tensor) else input_scale)
    if rule == "fp8-tensor" and static is not None:
        read_back = codecs.round_to(_divide(matrix, static), E4M3) * static
    else:
        codes, scale = _quantize(matrix, rule, static)
        whole = _expand(scale, rule, rows, k)
        read_back = codecs.decode(codes, E2M1 if rule in ("mxfp4", "nvfp4") else E4M3) * whole
        if static is not None:
            read_back = read_back * static
    return torch.from_numpy(read_back.reshape(values.shape))


def _quantize(
    matrix: Float32, format: str, global_scale: Float32 | np.float32 | None, e8m0: bool = False
) -> tuple[Codes, Float32]:
    """Element codes (..., N, K), one a byte, and the values of the scales (..., blocks of rows, blocks of K)."""
    *_, rows, k = matrix.shape
    block_rows, block_k = (size or whole for size, whole in zip(_BLOCKS[format], (rows, k), strict=True))
    if block_k in (16, 32) and k % block_k:
        raise ValueError(f"{format}: K must be a multiple of {block_k}; got {k}")
    code = E2M1 if format in ("mxfp4", "nvfp4") else E4M3
    scale = _block_amax(matrix, block_rows, block_k) / np.float32(codecs.LARGEST[code])
    if format in ("mxfp8", "mxfp4") or e8m0:
        scale = codecs.e8m0_values(codecs.e8m0_codes_above(scale))
    denominator = scale
    if format == "nvfp4":
        assert global_scale is not None
        scale = codecs.round_to(_divide(scale, global_scale), E4M3)
        denominator = scale * global_scale
    return codecs.encode(_divide(matrix, _expand(denominator, format, rows, k)), code), scale


def _divide(numerator: Float32, denominator: Float32 | np.float32) -> Float32:
    """fp32 quotient; 0 where the denominator is 0: a scale that underflowed stores nothing."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.asarray(numerator / denominator, dtype=np.float32)
    return np.where(np.broadcast_to(denominator, quotient.shape) == 0, np.float32(0), quotient)


def _block_amax(matrix: Float32, block_rows: int, block_k: int) -> Float32:
    """Largest magnitude of each block of (..., N, K); the blocks at the edge may be smaller."""
    magnitude = np.abs(matrix)
    *_, rows, k = matrix.shape
    by_rows = np.maximum.reduceat(magnitude, np.arange(0, rows, block_rows), axis=-2)
    return np.maximum.reduceat(by_rows, np.arange(0, k, block_k), axis=-1)


def _expand(scale: Float32, format: str, rows: int, k: int) -> Float32:
    """Block scales repeated to (..., N, K), cut at the edge."""
    block_rows, block_k = (size or whole for size, whole in zip(_BLOCKS[format], (rows, k), strict=True))
    # A dimension with one block broadcasts and needs no copies.
    if scale.shape[-2] > 1:
        scale = np.repeat(scale, block_rows, axis=-2)[..., :rows, :]
    if scale.shape[-1] > 1:
        scale = np.repeat(scale, block_k, axis=-1)[..., :k]
    return scale


def _per_row(global_scale: torch.Tensor, batch: tuple[int, ...], rows: int) -> Float32:
    """A global scale of (), (...,) or (..., N) as something that broadcasts over (..., N, K)."""
    values = codecs.to_float32(global_scale)
    if values.size == 1 or values.shape == batch:
        return values.reshape(*(values.shape if values.shape == batch else ()), 1, 1)
    if values.shape == (*batch, rows):
        return values[..., None]
    raise ValueError(f"global scale: expected one, {batch} or {(*batch, rows)}; got {values.shape}")
