"""Weights of 8 and 4 bits made into 16-bit operands, in registers and exactly.

A decoder puts the bits of a code where those of a 16-bit float are: that is the value times a power of two. One
multiplication then brings the block scale, or undoes that power where there is none. The power and what block scales
are stored with is in the row's scale at the end (`b12x_core.ops.packing`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Uint32, cute

_MULTIPLY = {"bf16": "mul.rn.bf16x2", "fp16": "mul.rn.f16x2"}


def multiply(kind, a, b):
    """The product of two registers of two "bf16" or "fp16" each, denormals kept."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 f; mov.b32 f, {$r1}; " + _MULTIPLY[kind] + " {$w0}, {$r0}, f; }",  # b may be a constant
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def permute(word, selector):
    """Bytes of a word put anew: `prmt` with zero as the other operand, `selector` a constant."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector:#06x};", write_only_types=[Uint32], read_only_args=[word]
    )


def place_e4m3(word, kind):
    """Four e4m3 -> registers of bytes 0, 1 and of bytes 2, 3: the values times 2^-120 as bf16, 2^-8 as fp16."""
    # byte i sits in the high byte of a 16-bit lane: prmt spreads bytes (0, 1) and (2, 3) there
    shift = Uint32(4 if kind == "bf16" else 1)
    return tuple(
        (h & Uint32(0x80008000)) | ((h & Uint32(0x7F007F00)) >> shift)
        for h in (permute(word, selector) for selector in (0x1404, 0x3424))
    )


def place_e2m1(word, kind):
    """Eight e2m1 -> four registers of two values, times 2^-126 as bf16, 2^-14 as fp16.

    In each half of the word: magnitudes 0 to 2 in bits 8 to 0, the highest first, and 3 in bits 15 to 13; signs 1, 0,
    2, 3 in bits 12 to 9. The low halves are the even k.
    """
    if kind == "bf16":
        magnitude, signed, negative = Uint32(0x01C001C0), Uint32(0x81C081C0), Uint32(0x80008000)
        return (
            (word & magnitude) | ((word << Uint32(4)) & negative),
            (word << Uint32(3)) & signed,
            (word << Uint32(6)) & signed,
            ((word >> Uint32(7)) & magnitude) | ((word << Uint32(5)) & negative),
        )
    magnitude, negative = Uint32(0x0E000E00), Uint32(0x80008000)
    return tuple(
        (placed & magnitude) | ((word << Uint32(sign)) & negative)
        for placed, sign in (
            (word << Uint32(3), 4),
            (word << Uint32(6), 3),
            (word << Uint32(9), 6),
            (word >> Uint32(4), 5),
        )
    )


def decode_e4m3_bf16(word):
    """Four e4m3 -> two registers of two bf16, exactly; bytes 0 and 1, bytes 2 and 3."""
    return tuple(multiply("bf16", h, Uint32(0x7B807B80)) for h in place_e4m3(word, "bf16"))  # 2^120


def decode_e4m3_fp16(word):
    """Four e4m3 -> two registers of two fp16, exactly; bytes 0 and 1, bytes 2 and 3."""
    return tuple(
        cute.arch.inline_ptx(
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, " + half + "; }",
            write_only_types=[Uint32],
            read_only_args=[word],
        )
        for half in ("lo", "hi")
    )


DECODE = {("e4m3", "bf16"): decode_e4m3_bf16, ("e4m3", "fp16"): decode_e4m3_fp16}
"""(weight, activation) -> decoder of a register of four weights that have no scale in the loop."""

PLACE = {"e2m1": place_e2m1, "e4m3": place_e4m3}
"""weight -> what puts the bits of a register of weights in place."""


@dataclass(frozen=True)
class ScaleCodes:
    """How block scales are stored behind the codes of a packed tile, and what they are as 16-bit floats.

    A lane has one word of them for a tile and a group of 16 rows: byte 2 step + half, half 1 for row g + 8.

    Attributes:
        group_bytes: of a group of 16 rows.
        kind: "nv16" or "mx32".
    """

    kind: str
    group_bytes: int

    def lane_offset(self, lane):
        """Where a lane's word is, within a group."""
        if self.group_bytes == 128:
            return lane * 4
        if self.group_bytes == 64:
            return lane // 2 * 4
        return lane // 4 * 4

    def expand(self, word, byte, activation):
        """The scale of a byte, a constant number, as two equal "bf16" or "fp16"."""
        both = permute(word, 0x4040 | byte << 8 | byte)  # the byte in the low byte of each half
        if self.kind == "nv16":
            if activation == "bf16":
                return both * Uint32(16) + Uint32(0x70007000)
            return both * Uint32(128)
        if activation == "bf16":
            return both * Uint32(128)
        one = (word >> Uint32(8 * byte)) & Uint32(0xFF)
        return Uint32(cutlass.max(Int32(one) - 224, 0)) * Uint32(0x04000400)


def scale_codes(weight, scales):
    """The `ScaleCodes` of a weight type and "nv16" or "mx32"."""
    return ScaleCodes(scales, {"nv16": 128, "mx32": 64 if weight == "e2m1" else 32}[scales])
