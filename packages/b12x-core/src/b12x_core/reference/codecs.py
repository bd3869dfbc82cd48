"""Codes of elements and scales: encoding with round to nearest even and saturation, and decoding to float32.

e4m3 and e5m2 are torch dtypes. Definitions: OCP OFP8 (e4m3, e5m2); OCP Microscaling Formats v1.0 (e2m1, e8m0).
"""

from __future__ import annotations

import functools

import torch

from b12x_core.formats import Element

FP8_DTYPE = {Element.E4M3: torch.float8_e4m3fn, Element.E5M2: torch.float8_e5m2}

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by code; bit 3 is the sign."""

# Half way between neighbours. A tie goes to the even code, so a bound belongs to the upper value if that is even.
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@functools.cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """(256, 2) float32: the two values of a byte, the low nibble first."""
    signed = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES))
    codes = torch.arange(256)
    return torch.stack((signed[codes & 15], signed[codes >> 4]), dim=1).to(device)


@functools.cache
def _fp8_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(256,) float32: the value of every code."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """table[codes] for uint8 codes; on a CPU four times as fast as indexing or as torch's own conversion of FP8."""
    return table.index_select(0, codes.int().flatten()).view(*codes.shape, *table.shape[1:])


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """(..., K/2) uint8 -> (..., K) float32. The low nibble holds the even k."""
    return _look_up(_e2m1_pairs(packed.device), packed).flatten(-2)


def decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 or e5m2 -> float32."""
    return _look_up(_fp8_values(codes.dtype, codes.device), codes.view(torch.uint8))


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """(..., K) float32 -> (..., K/2) uint8, to nearest, ties to the even code, saturating at 6. NaN becomes 0."""
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for upper, bound in enumerate(_E2M1_BOUNDS, start=1):
        code += (magnitude >= bound if upper % 2 == 0 else magnitude > bound).to(torch.uint8)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def encode_fp8(values: torch.Tensor, element: Element) -> torch.Tensor:
    """float32 -> e4m3 or e5m2, to nearest even, saturating. NaN stays NaN."""
    return values.clamp(-element.largest, element.largest).to(FP8_DTYPE[element])


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """e8m0 (uint8 or float8_e8m0fnu) -> float32 powers of two, 2 ** (code - 127); 255 is NaN."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def encode_e8m0_up(values: torch.Tensor) -> torch.Tensor:
    """Positive float32 -> float8_e8m0fnu, the least power of two that is not smaller; 0 becomes 2 ** -127.

    Rounding up keeps value / scale within the element's range, so nothing saturates. It is what the conversion
    instruction `cvt.rp.satfinite.ue8m0x2.f32` (PTX ISA) does.
    """
    mantissa, exponent = torch.frexp(values)  # values = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    code = torch.where(values > 0, power + 127, 0).clamp(0, 254)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)
