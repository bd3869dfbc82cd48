"""Warp-level matrix instructions of 16 weight rows by 8 tokens, and decoding of 8-bit weights to 16 bits.

Fragments are 32-bit registers in the order of the PTX ISA (section "Matrix multiply-accumulate operation using
mma instruction"); accumulators are fp32: d0, d1 = (row g, tokens 2t, 2t + 1), d2, d3 = (row g + 8, the same tokens)
of lane 4 g + t.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Uint32, cute


@dataclass(frozen=True)
class Mma:
    """A matrix instruction whose operands are four registers of weight and two of tokens.

    Attributes:
        k: elements of K that one instruction takes.
        ptx: mnemonic.
    """

    k: int
    ptx: str

    def __call__(self, a, b, c):
        """D = A B + C.

        Args:
            a, b, c: sequences of 4 and 2 Uint32 and 4 Float32.

        Returns:
            4 Float32.
        """
        return cute.arch.inline_ptx(
            f"{self.ptx} {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, {{ {{$r0}}, {{$r1}}, {{$r2}}, {{$r3}} }}, "
            "{ {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )


BF16 = Mma(16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
FP16 = Mma(16, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
E4M3 = Mma(32, "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32")

BY_ACTIVATION = {"bf16": BF16, "fp16": FP16, "e4m3": E4M3}
"""The instruction by the type that the tokens have; a narrower weight is decoded to that type first."""


def decode_e4m3_bf16(word):
    """Four e4m3 -> two registers of two bf16, exactly.

    The bits of e4m3 put in place are the value times 2^-120, subnormals included; one exact multiplication mends that.
    The low register holds bytes 0 and 1, the high one bytes 2 and 3.
    """
    # byte i sits in the high byte of a 16-bit lane: prmt spreads bytes (0, 1) and (2, 3) there
    halves = [
        cute.arch.inline_ptx(
            f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector};", write_only_types=[Uint32], read_only_args=[word]
        )
        for selector in ("0x1404", "0x3424")
    ]
    return tuple(
        cute.arch.inline_ptx(
            # 0x7B80 is 2^120 as bf16
            "{ .reg .b32 f; mov.b32 f, 0x7B807B80; mul.rn.bf16x2 {$w0}, {$r0}, f; }",
            write_only_types=[Uint32],
            read_only_args=[(h & Uint32(0x80008000)) | ((h & Uint32(0x7F007F00)) >> Uint32(4))],
        )
        for h in halves
    )


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
"""(weight, activation) -> decoder of a register of four weights."""
