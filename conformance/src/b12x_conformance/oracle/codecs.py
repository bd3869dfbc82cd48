"""Codes of elements and scales, by the `ml_dtypes` library: nothing here is shared with the code under test.

Definitions: OCP 8-bit Floating Point (e4m3, e5m2), OCP Microscaling Formats v1.0 (e2m1, e8m0). Encoding rounds to
nearest, ties to even, and saturates at the largest finite magnitude.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

LARGEST = {E2M1: 6.0, E4M3: 448.0, E5M2: 57344.0}
"""Largest finite magnitude of each element code."""

_OF_TORCH = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.float8_e8m0fnu: E8M0}


def to_float32(tensor: torch.Tensor) -> Float32:
    """The values of a float tensor of any dtype and device, 8-bit dtypes decoded by `ml_dtypes`."""
    tensor = tensor.detach().cpu()
    code = _OF_TORCH.get(tensor.dtype)
    if code is not None:
        return decode(tensor.contiguous().view(torch.uint8).numpy(), code)
    return np.array(tensor.to(torch.float32).numpy())


def encode(values: npt.ArrayLike, code: np.dtype) -> Codes:
    """Codes (uint8, one element a byte) of `values`: nearest, ties to even, saturated."""
    largest = LARGEST[code]
    return np.clip(np.asarray(values, dtype=np.float32), -largest, largest).astype(code).view(np.uint8)


def decode(codes: Codes, code: np.dtype) -> Float32:
    """float32 values of uint8 codes, one element a byte."""
    return np.ascontiguousarray(codes).view(code).astype(np.float32)


def round_to(values: npt.ArrayLike, code: np.dtype) -> Float32:
    """`values` rounded to the nearest value of `code`, saturated."""
    return decode(encode(values, code), code)


def pack_e2m1(codes: Codes) -> Codes:
    """(..., K) e2m1 codes, one a byte, to (..., K / 2) bytes: the low nibble holds the even k."""
    nibbles = codes & 0xF
    packed: Codes = nibbles[..., 0::2] | np.left_shift(nibbles[..., 1::2], 4, dtype=np.uint8)
    return packed


def unpack_e2m1(data: Codes) -> Codes:
    """The inverse of `pack_e2m1`."""
    return np.stack([data & 0xF, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def e8m0_codes_above(values: npt.ArrayLike) -> Codes:
    """Codes of the smallest power of two that is no less than each value: 2 ** ceil(log2(value)).

    Zero and what is below 2 ** -127 give code 0 (2 ** -127); what is above 2 ** 127 gives code 254.
    """
    # frexp: value = mantissa * 2 ** exponent with the mantissa in [0.5, 1), so a mantissa of exactly 0.5 is a power
    # of two itself. log2 of a float could be off by a bit just there.
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    ceiling = np.where(mantissa == 0.5, exponent - 1, exponent)
    ceiling = np.where(mantissa == 0.0, -127, ceiling)
    return (np.clip(ceiling, -127, 127) + 127).astype(np.uint8)


def e8m0_values(codes: Codes) -> Float32:
    """float32 values of e8m0 codes: 2 ** (code - 127); code 255 is NaN."""
    return decode(codes, E8M0)
