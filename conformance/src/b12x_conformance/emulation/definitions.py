"""What instructions of sm_120a do, in float64 and exact fractions, written from the PTX ISA 9.0 manual.

Nothing here is shared with the stand-ins. Warps are arrays `(..., 32, registers)` of uint32, a lane in each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

LANES = np.arange(32)
GROUP, IN_GROUP = LANES >> 2, LANES & 3


@dataclass(frozen=True)
class Format:
    """A code of sign, exponent and mantissa.

    Attributes:
        exponent, mantissa: their bits; the sign has one.
        bias: of the exponent.
        special: `""`, or `"nan"` (only all ones is NaN, e4m3), or `"ieee"` (the last exponent holds infinity and NaN).
    """

    exponent: int
    mantissa: int
    bias: int
    special: str = ""

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent + self.mantissa

    def values(self) -> Values:
        """The value of every code."""
        codes = np.arange(1 << self.bits)
        e = (codes >> self.mantissa) & ((1 << self.exponent) - 1)
        m = codes & ((1 << self.mantissa) - 1)
        fraction = m / (1 << self.mantissa) + (e > 0)
        out = np.ldexp(fraction, np.maximum(e, 1) - self.bias)
        if self.special == "nan":
            out[(codes & ((1 << (self.bits - 1)) - 1)) == (1 << (self.bits - 1)) - 1] = np.nan
        if self.special == "ieee":
            out = np.where(e == (1 << self.exponent) - 1, np.where(m == 0, np.inf, np.nan), out)
        return np.where(codes >> (self.bits - 1), -out, out)

    def nearest(self, x: Values) -> Integers:
        """Codes nearest to values, ties to the even mantissa, saturated; NaN gives the largest (`cvt.rn.satfinite`)."""
        positive = self.values()[: 1 << (self.bits - 1)]
        positive = positive[np.isfinite(positive)]
        magnitude = np.minimum(np.nan_to_num(np.abs(x), nan=np.inf), positive[-1])
        above = np.clip(np.searchsorted(positive, magnitude), 1, len(positive) - 1)
        low, high = magnitude - positive[above - 1], positive[above] - magnitude
        up = (high < low) | ((high == low) & (above % 2 == 0))
        code = np.where(up, above, above - 1)
        return np.where(np.signbit(x) & ~np.isnan(x), code | 1 << (self.bits - 1), code)


E4M3 = Format(4, 3, 7, "nan")
E5M2 = Format(5, 2, 15, "ieee")
E3M2 = Format(3, 2, 3)
E2M3 = Format(2, 3, 1)
E2M1 = Format(2, 1, 1)
F16 = Format(5, 10, 15, "ieee")
BF16 = Format(8, 7, 127, "ieee")
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1, "f16": F16, "bf16": BF16}


def f32(words: npt.ArrayLike) -> Values:
    """fp32 words as float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.ascontiguousarray(words, dtype=np.uint32).view(np.float32).astype(np.float64)


def scale_values(codes: Integers, kind: str) -> Values:
    """Scales of bytes: ue8m0 is 2 ** (code - 127) and NaN at 255; ue4m3 is e4m3 without a sign."""
    if kind == "ue8m0":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))
    return E4M3.values()[codes & 0x7F]


# ---- mma ------------------------------------------------------------------------------------------------------------


def unpack(words: Words, per_word: int) -> Integers:
    """The codes in registers, lowest bits first: (..., n) to (..., n * per_word)."""
    width = 32 // per_word
    parts = (words[..., None].astype(np.int64) >> (width * np.arange(per_word))) & ((1 << width) - 1)
    return parts.reshape(*words.shape[:-1], -1)


def elements(words: Words, name: str, k: int) -> Integers:
    """Codes in operand registers of `.m16n8k32` (8-bit containers: 4-bit ones in bits 2 to 5) or `.m16n8k64`."""
    if k == 64:
        return unpack(words, 8)
    codes = unpack(words, 4)
    return (codes >> 2) & 0xF if name == "e2m1" else codes & ((1 << FORMATS[name].bits) - 1)


def matrix_a(fragments: Integers, k: int) -> Integers:
    """(..., 32, 16 or 32) elements a_i of the lanes to A (..., 16, k)."""
    n = k // 8  # elements in a register
    out = np.zeros((*fragments.shape[:-2], 16, k), dtype=fragments.dtype)
    for i in range(4 * n):
        upper_row, upper_k = (i // n) % 2, i // (2 * n)
        out[..., GROUP + 8 * upper_row, IN_GROUP * n + i % n + upper_k * k // 2] = fragments[..., i]
    return out


def matrix_b(fragments: Integers, k: int) -> Integers:
    """(..., 32, 8 or 16) elements b_i of the lanes to B (..., k, 8)."""
    n = k // 8
    out = np.zeros((*fragments.shape[:-2], k, 8), dtype=fragments.dtype)
    for i in range(2 * n):
        out[..., IN_GROUP * n + i % n + (i // n) * k // 2, GROUP] = fragments[..., i]
    return out


def matrix_c(fragments: npt.NDArray[np.float64]) -> Values:
    """(..., 32, 4) accumulators c_i of the lanes to C (..., 16, 8)."""
    out = np.zeros((*fragments.shape[:-2], 16, 8))
    for i in range(4):
        out[..., GROUP + 8 * (i // 2), 2 * IN_GROUP + i % 2] = fragments[..., i]
    return out


def scale_matrices(
    sfa: Words, sfb: Words, blocks: int, selectors: tuple[int, int, int, int]
) -> tuple[Integers, Integers]:
    """Codes of scale_A (..., 16, blocks) and scale_B (..., blocks, 8).

    Args:
        sfa, sfb: (..., 32), the scale registers.
        blocks: 1, 2 or 4, as in `.scale_vec::2X`.
        selectors: byte-id-a, thread-id-a, byte-id-b, thread-id-b.
    """
    byte_a, thread_a, byte_b, thread_b = selectors
    a = np.zeros((*sfa.shape[:-1], 16, blocks), dtype=np.int64)
    b = np.zeros((*sfb.shape[:-1], blocks, 8), dtype=np.int64)
    for block in range(blocks):
        for row in range(16):
            # the thread pair of quad `row % 8` that thread-id-a names: its first thread has the upper rows
            lane = 4 * (row % 8) + 2 * thread_a + row // 8
            a[..., row, block] = (sfa[..., lane] >> np.uint32(8 * (byte_a + block))) & 0xFF
        for column in range(8):
            b[..., block, column] = (sfb[..., 4 * column + thread_b] >> np.uint32(8 * (byte_b + block))) & 0xFF
    return a, b


def multiply(a: Values, b: Values, c: Values, sa: Values | None, sb: Values | None) -> tuple[Values, Values]:
    """(A * scale_A) (B * scale_B) + C, and the sum of the magnitudes of its terms."""
    if sa is not None and sb is not None:
        a = a * np.repeat(sa, a.shape[-1] // sa.shape[-1], axis=-1)
        b = b * np.repeat(sb, b.shape[-2] // sb.shape[-2], axis=-2)
    return a @ b + c, np.abs(a) @ np.abs(b) + np.abs(c)


# ---- ldmatrix, stmatrix ---------------------------------------------------------------------------------------------


def _row_elements(rows: npt.NDArray[np.uint8], width: int) -> Integers:
    """16 elements of a number of bits out of rows of 16 bytes, lowest bits first."""
    bits = np.unpackbits(rows, axis=-1, bitorder="little")[..., : 16 * width]
    return (bits.reshape(*rows.shape[:-1], 16, width).astype(np.int64) << np.arange(width)).sum(-1)


def load_m8n16(rows: npt.NDArray[np.uint8], number: int, width: int) -> Words:
    """Of ldmatrix .m8n16: rows (..., 32, 16) that the lanes address to registers (..., 32, number)."""
    matrix = _row_elements(rows, width)
    out = np.zeros((*rows.shape[:-2], 32, number), dtype=np.uint32)
    for register in range(number):
        for i in range(4):
            element = matrix[..., 8 * register + GROUP, 4 * IN_GROUP + i]
            out[..., register] |= (element << (8 * i)).astype(np.uint32)
    return out


def load_m16n16(rows: npt.NDArray[np.uint8], number: int, width: int) -> Words:
    """Of ldmatrix .m16n16 .trans: rows (..., 32, 16) to registers (..., 32, 2 * number)."""
    out = np.zeros((*rows.shape[:-2], 32, 2 * number), dtype=np.uint32)
    for m in range(number):
        transposed = np.swapaxes(_row_elements(rows[..., 16 * m : 16 * m + 16, :], width), -1, -2)
        for half in range(2):
            for i in range(4):
                element = transposed[..., GROUP + 8 * half, 4 * IN_GROUP + i]
                out[..., 2 * m + half] |= (element << (8 * i)).astype(np.uint32)
    return out


def store_m16n8(registers: Words, number: int) -> npt.NDArray[np.uint8]:
    """Of stmatrix .m16n8 .trans: registers (..., 32, number) to rows (..., 32, 16) of the addresses; others stay 0."""
    out = np.zeros((*registers.shape[:-2], 32, 16), dtype=np.uint8)
    for m in range(number):
        matrix = np.zeros((*registers.shape[:-2], 16, 8), dtype=np.uint8)
        codes = unpack(registers[..., m : m + 1], 4)
        for i in range(4):
            matrix[..., GROUP + 8 * (i // 2), 2 * IN_GROUP + i % 2] = codes[..., i]
        out[..., 8 * m : 8 * m + 8, :] = np.swapaxes(matrix, -1, -2)
    return out


# ---- cvt ------------------------------------------------------------------------------------------------------------


def to_ue8m0(x: Values, up: bool, satfinite: bool) -> Integers:
    """|x| as a power of two, rounded to zero or (`up`) to infinity; beyond 2 ** 127: NaN (255), or 254."""
    magnitude = np.abs(x)
    mantissa, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))  # magnitude in [2^(e-1), 2^e)
    power = exponent - 1 + (up & (mantissa != 0.5))
    power = np.where(magnitude == 0, -127, np.maximum(power, -127))
    power = np.where(np.isinf(magnitude), 128, power)
    code = np.where(power > 127, 254 if satfinite else 255, power + 127)
    return np.where(np.isnan(x), 255, code)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def round_f32(x: Fraction, negative_zero: bool, mode: str) -> float:
    """An exact value rounded to fp32: `rn`, `rz`, `rm` or `rp`."""
    if x == 0:
        return -0.0 if negative_zero else 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length(), -126)
    while exponent > -126 and x < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (exponent - 23)
    steps, rest = divmod(x, quantum)
    away = {"rz": False, "rm": sign < 0, "rp": sign > 0}.get(mode)
    to_nearest = rest * 2 > quantum or (rest * 2 == quantum and steps % 2 == 1)
    up = to_nearest if away is None else away and rest > 0
    value = (steps + up) * quantum
    if value >= Fraction(2) ** 128:
        value_out = math.inf if mode == "rn" or away else float((2 - Fraction(2) ** -23) * Fraction(2) ** 127)
        return sign * value_out
    return sign * float(value)


def fused(a: float, b: float, c: float, mode: str, ftz: bool) -> float:
    """Multiply a and b and add c, with one rounding to fp32; `ftz` makes subnormal inputs and results zero."""
    if ftz:
        a, b, c = (math.copysign(0.0, v) if abs(v) < 2.0**-126 else v for v in (a, b, c))
    if not all(math.isfinite(v) for v in (a, b, c)):
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    product_negative = math.copysign(1, a) * math.copysign(1, b) < 0
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    # A zero sum of terms of unlike sign is +0, but -0 when rounding down; of like sign it keeps the sign.
    like = product_negative == (math.copysign(1, c) < 0)
    negative = product_negative if like else mode == "rm"
    if exact == 0 and a * b != 0 and not like:
        negative = mode == "rm"
    result = round_f32(exact, negative, mode)
    if ftz and abs(result) < 2.0**-126:
        result = math.copysign(0.0, result)
    return result
