"""Warp-level matrix instructions of 16 weight rows by 8 tokens.

Fragments are 32-bit registers in the order of the PTX ISA (section "Matrix multiply-accumulate operation using
mma instruction"); accumulators are fp32: d0, d1 = (row g, tokens 2t, 2t + 1), d2, d3 = (row g + 8, the same tokens)
of lane 4 g + t.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, cute


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
