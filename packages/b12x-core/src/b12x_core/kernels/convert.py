"""Exact conversions from float32 to stored codes, in instructions that every target has.

Each function has the result of the one of the same purpose in `b12x_core.reference`, for every input: zeros of both
signs, subnormals, infinities and NaN included. Magnitudes travel as the bits of a non-negative float32, whose order
as integers is the order of the values with NaN above infinity, so that an integer maximum keeps a NaN.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Uint32, cute

_MAGIC = 0x4B000000
"""Bits of 2^23: a number added to it is rounded to an integer, ties to even, which the low bits hold."""


def ptx(code, *args, result=Float32):
    """One result from a PTX statement whose operands are named {$w0} and {$r0}, {$r1}, ..."""
    return cute.arch.inline_ptx(code, write_only_types=[result], read_only_args=list(args))


def bits(value):
    """The bits of a float32."""
    return ptx("mov.b32 {$w0}, {$r0};", value, result=Uint32)


def from_bits(word):
    """The float32 of those bits."""
    return ptx("mov.b32 {$w0}, {$r0};", word)


def multiply(a, b):
    """A b, rounded by itself whatever follows; subnormals kept."""
    return ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def fma(a, b, c):
    """A b + c, rounded once."""
    return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def divide(a, b):
    """A / b, rounded once; subnormals kept."""
    return ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def largest_of(a, b):
    """The larger of two magnitudes given as bits."""
    return ptx("max.u32 {$w0}, {$r0}, {$r1};", a, b, result=Uint32)


@cute.jit
def divide_by_constant(a: Float32, constant: cutlass.Constexpr):
    """A / constant, rounded once, of an a that is not negative and a constant from 1 to 1024."""
    inverse = cutlass.const_expr(struct.unpack("f", struct.pack("f", 1 / constant))[0])
    rest = cutlass.const_expr((1.0 - inverse * constant) * inverse)
    # right as in `divide_all` of 24 bits
    quotient = fma(a, Float32(inverse), multiply(a, Float32(rest)))
    quotient = fma(fma(-quotient, Float32(constant), a), Float32(inverse), quotient)
    if (a < Float32(2.0**-80)) | (a >= Float32(math.inf)) | (a != a):
        quotient = divide(a, Float32(constant))
    return quotient


@cute.jit
def divide_or_zero(a, b):
    """A / b, and 0 where b is 0."""
    quotient = divide(a, b)
    if b == Float32(0.0):
        quotient = Float32(0.0)
    return quotient


@dataclass(frozen=True)
class Divisor:
    """What divides many values by one step with a single reciprocal. Made by `divisor`.

    Attributes:
        step, inverse, rest: the step (times `factor`), its reciprocal, and what that lacks of the exact one.
        plain: whether values can be divided as they are.
        factor, bound: otherwise, what they are multiplied with and clamped to before.
        zero: whether the step is 0.
        wide: whether values have 24 significant bits, not at most 11.
    """

    step: Float32
    inverse: Float32
    rest: Float32
    plain: Boolean
    factor: Float32
    bound: Float32
    zero: Boolean
    wide: bool


@cute.jit
def _divisor_parts(step: Float32, amax: Uint32, wide: cutlass.Constexpr):
    size = from_bits(bits(step) & Uint32(0x7FFFFFFF))
    plain = (size >= Float32(2.0**-80)) & (size <= Float32(2.0**100))
    factor = Float32(1.0)
    if size < Float32(2.0**-80):
        factor = Float32(2.0**100)
    if size > Float32(2.0**100):
        factor = Float32(2.0**-60)
    bound = multiply(multiply(size, factor), Float32(1024.0))
    plain = plain & (from_bits(amax) <= bound)
    scaled = multiply(step, factor)
    inverse = ptx(f"rcp.{'rn' if wide else 'rz'}.f32 {{$w0}}, {{$r0}};", scaled)
    rest = fma(-scaled, inverse, Float32(1.0))
    if cutlass.const_expr(wide):
        rest = multiply(rest, inverse)
    else:
        rest = ptx("{ .reg .f32 e; fma.rp.f32 e, {$r0}, {$r0}, {$r0}; mul.rp.f32 {$w0}, e, {$r1}; }", rest, inverse)
    zero = size == Float32(0.0)
    infinite = size == Float32(math.inf)
    if zero | infinite:
        scaled = Float32(0.0)
        inverse = Float32(0.0)
        rest = Float32(0.0)
    if infinite:  # what is finite becomes 0 with its sign, and infinity NaN
        factor = Float32(0.0)
        bound = Float32(1.0)
    return scaled, inverse, rest, plain, factor, bound, zero


def divisor(step, amax, x: str):
    """For dividing by `step`.

    Args:
        step: float32.
        amax: bits of a magnitude that none of the values exceeds, or of NaN.
        x: type that the values came from, "bf16", "fp16" or "fp32".
    """
    return Divisor(*_divisor_parts(step, amax, x == "fp32"), x == "fp32")


@cute.jit
def divide_all(values: cute.Tensor, by: cutlass.Constexpr):
    """Each value / step, so that e4m3 and e2m1 codes are those of the quotient rounded to float32; 0 where step is 0.

    The first quotient, of a reciprocal of nearly 48 bits, is rounded once and nearly always right: it may differ from
    the rounded quotient where that lies within 2^-45 of the middle of two float32. Of values with 24 bits, one step
    with the exact remainder mends that (Markstein's theorem). Values of 16-bit types need no mending: codes change
    only at ties, numbers t of at most 5 bits, so the quotient would have to be t (1 + u) with u about 2^-24. With S
    the 24 bits of the step as an integer, that requires S = c 2^24 + d for a c of at most 4 bits and a small integer
    d, and a value that is t c, since no other of 11 bits is near; which leaves |d| = S / 2^24 / (t without its
    exponent). That is between 0.25 and 0.95, so no integer, unless t is a power of two. The smallest tie is one, with
    S = 2^24 - 1; for its sake the reciprocal is rounded down and what it lacks is rounded up.

    Nothing may underflow or be infinite on the way: values and step are moved by a power of two where they could be,
    and quotients above 1024, which saturate anyway, become 1024. Quotients far too small for any code keep their sign.

    Args:
        values: float32 in registers, replaced.
        by: a `Divisor`.
    """
    count = cute.size(values)
    if not by.plain:
        for i in cutlass.range_constexpr(count):
            clamped = ptx(
                "{ .reg .f32 v, n; mul.rn.f32 v, {$r0}, {$r1}; neg.f32 n, {$r2}; "
                "max.NaN.f32 v, v, n; min.NaN.f32 {$w0}, v, {$r2}; }",
                values[i],
                by.factor,
                by.bound,
            )
            if by.zero:
                clamped = Float32(0.0)
            values[i] = clamped
    for i in cutlass.range_constexpr(count):
        quotient = fma(values[i], by.inverse, multiply(values[i], by.rest))
        if cutlass.const_expr(by.wide):
            quotient = fma(fma(-quotient, by.step, values[i]), by.inverse, quotient)
            # sums of a zero with a zero of the other sign lose the sign
            quotient = ptx("copysign.f32 {$w0}, {$r0}, {$r1};", values[i], quotient)
        values[i] = quotient


def pack_e4m3(values):
    """Four float32 -> a word of four e4m3, to nearest even, saturating; NaN becomes 0x7F."""
    return ptx(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2}; mov.b32 {$w0}, {lo, hi}; }",
        *values,
        result=Uint32,
    )


def e4m3_code(value):
    """float32 -> the code of the nearest e4m3, in the low byte."""
    return pack_e4m3([value, Float32(0.0), Float32(0.0), Float32(0.0)])


def e4m3_value(code):
    """The code of an e4m3 -> float32."""
    return ptx(
        "{ .reg .b16 c, lo, hi; .reg .b32 pair; cvt.u16.u32 c, {$r0}; cvt.rn.f16x2.e4m3x2 pair, c; "
        "mov.b32 {lo, hi}, pair; cvt.f32.f16 {$w0}, lo; }",
        code,
    )


def pack_e2m1(values):
    """Eight float32 -> a word of eight e2m1, the first in the low nibble; to nearest even, saturating; NaN becomes 0.

    The code of a magnitude v, taken as a real number, is min(2 v, v + 2, v / 2 + 4, 7): the slope halves at 2 and at
    4. Rounding is monotone, so each line is rounded by the one addition that evaluates it, and the minimum comes
    last. Values half way between two codes go to the even code because even numbers were added.
    """
    codes = Uint32(0)
    signs = Uint32(0)
    for value in reversed(values):
        code = ptx(
            "{ .reg .f32 v, a, b; abs.f32 v, {$r0}; "
            "fma.rn.f32 a, v, 0f40000000, 0f4B000000; "  # 2 v
            "max.f32 a, a, 0f4B000000; "  # NaN is not a number that max returns
            "add.rn.f32 b, v, 0f4B000002; min.f32 a, a, b; "  # v + 2
            "fma.rn.f32 b, v, 0f3F000000, 0f4B000004; min.f32 a, a, b; "  # v / 2 + 4
            "min.f32 a, a, 0f4B000007; mov.b32 {$w0}, a; }",
            value,
            result=Uint32,
        )
        codes = codes * Uint32(16) + code
        # four top bits at a time; of each four only the first, the sign, is used
        signs = ptx("shf.l.wrap.b32 {$w0}, {$r0}, {$r1}, 4;", bits(value), signs, result=Uint32)
    extra = sum(_MAGIC << (4 * i) for i in range(8)) & 0xFFFFFFFF
    return (codes - Uint32(extra)) | (signs & Uint32(0x88888888))


_ROUNDING = {
    # e4m3: NaN stays; steps halve down to 2^-6
    "e4m3": "min.NaN.f32 v, v, 0f43E00000; "
    "max.f32 m, v, 0f3C800000; and.b32 m, m, 0x7F800000; mul.f32 m, m, 0f49C00000;",
    # e2m1: NaN becomes 0; steps halve down to 1
    "e2m1": "max.f32 v, v, 0f00000000; min.f32 v, v, 0f40C00000; "
    "max.f32 m, v, 0f3F800000; and.b32 m, m, 0x7F800000; mul.f32 m, m, 0f4AC00000;",
}


def rounded(value, element: str):
    """float32 -> the value of the code that `pack_e4m3` or `pack_e2m1` gives, as float32.

    Values are multiples of a step that depends on the exponent; adding 1.5 2^23 steps rounds to one, ties to even.
    """
    return ptx(
        f"{{ .reg .f32 v, m; abs.f32 v, {{$r0}}; {_ROUNDING[element]} "
        "add.rn.f32 v, v, m; sub.rn.f32 v, v, m; copysign.f32 {$w0}, {$r0}, v; }",
        value,
    )


def round_all(values, element: str, factor=None):
    """Float32 in registers, each replaced by its `rounded`, times a factor if one is given: exact, or to nearest."""
    for i in range(cute.size(values)):
        value = rounded(values[i], element)
        values[i] = value if factor is None else multiply(value, factor)


def pack_bf16(values):
    """Two float32 -> a word of two bf16, to nearest even."""
    return ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", *values, result=Uint32)


def e8m0_value(code):
    """The code of an e8m0 that is not NaN -> float32."""
    return from_bits(largest_of(code << Uint32(23), Uint32(0x00400000)))  # 2^-127 is subnormal


@cute.jit
def e8m0_code_up(value: Float32):
    """Code of the least power of two that is not smaller than a float32 that is not negative.

    0 and NaN have code 0, and infinity 127, as in the reference.
    """
    word = bits(value)
    code = (word + Uint32(0x007FFFFF)) >> Uint32(23)
    if word <= Uint32(0x00400000):  # 2^-127, which is subnormal
        code = Uint32(0)
    if word > Uint32(0x7F000000):  # above 2^127
        code = Uint32(254)
    if word == Uint32(0x7F800000):
        code = Uint32(127)
    if word > Uint32(0x7F800000):
        code = Uint32(0)
    return code


@cute.jit
def e8m0_inverse(code: Uint32):
    """2^(127 - code), what divides by the scale of that code exactly."""
    word = (Uint32(254) - code) << Uint32(23)
    if code == Uint32(254):
        word = Uint32(0x00400000)
    return from_bits(word)
