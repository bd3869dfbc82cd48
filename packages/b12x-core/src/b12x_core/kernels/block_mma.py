"""Block-scaled matrix instructions of SM120: 16 weight rows by 8 tokens, scales along K as operands.

Fragments are those of `mma`, in bytes: lane 4 g + t has bytes 4 t to 4 t + 3 and 16 + 4 t to 16 + 4 t + 3 of 32 bytes
of K (PTX ISA, "Matrix Fragments for mma.m16n8k32" and "mma.m16n8k64").

An instruction takes the scales of rows g and g + 8 from two lanes of the four 4 g + t and those of token g from one of
them; which ones, it says as a constant. So the four lanes together load the scales of two groups of rows, or of four
groups of tokens, in one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Uint32, cute

from b12x_core.kernels import bulk


@dataclass(frozen=True)
class BlockMma:
    """An instruction whose operands are four registers of weight and two of tokens, and a word of scales of each.

    Attributes:
        k: elements of K that one instruction takes.
        blocks: scales along K of a row, from neighbouring bytes of the word.
        ptx: mnemonic.
    """

    k: int
    blocks: int
    ptx: str

    def __call__(self, a, b, c):
        """D = (A * scales) (B * scales) + C.

        Args:
            a, b: 4 and 2 Uint32, then the word of scales, the first byte of it that holds for these, and which lanes
                have it: 0 or 1 for lanes 4 g, 4 g + 1 or 4 g + 2, 4 g + 3; 0 to 3.
            c: 4 Float32.

        Returns:
            4 Float32.
        """
        *a_words, a_scale, a_byte, a_lanes = a
        *b_words, b_scale, b_byte, b_lane = b
        return cute.arch.inline_ptx(
            f"{self.ptx} {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, {{ {{$r0}}, {{$r1}}, {{$r2}}, {{$r3}} }}, "
            "{ {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} }, "
            f"{{$r10}}, {{ {a_byte}, {a_lanes} }}, {{$r11}}, {{ {b_byte}, {b_lane} }};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a_words, *b_words, *c, a_scale, b_scale],
        )


def _mma(kind: str, blocks: int, k: int, a: str, b: str, scale: str) -> BlockMma:
    shape = f"m16n8k{k}.row.col"
    scaled = f"kind::{kind}.block_scale.scale_vec::{blocks}X"
    return BlockMma(k, blocks, f"mma.sync.aligned.{scaled}.{shape}.f32.{a}.{b}.f32.{scale}")


BLOCK_MMA = {
    ("e4m3", "e4m3", "mx32"): _mma("mxf8f6f4", 1, 32, "e4m3", "e4m3", "ue8m0"),
    ("e2m1", "e4m3", "mx32"): _mma("mxf8f6f4", 1, 32, "e2m1", "e4m3", "ue8m0"),
    ("e2m1", "e2m1", "mx32"): _mma("mxf4", 2, 64, "e2m1", "e2m1", "ue8m0"),
    ("e2m1", "e2m1", "nv16"): _mma("mxf4nvf4", 4, 64, "e2m1", "e2m1", "ue4m3"),
}
"""(weight, activation, scales) -> the instruction."""


class BlockOperands:
    """Operands of the weight and scales of both sides, for a loop over steps of 32 bytes of K of the weight.

    Attributes:
        parts, instructions: as in `weight_operands`.
        unit: bytes of scales of a row, or a token, in a packed tile.
        scale_bytes: of 16 rows.
    """

    instructions = 1

    def __init__(self, weight, activation, scales):
        self.nibbles = (weight, activation) == ("e2m1", "e4m3")  # 4-bit codes in containers of 8 bits
        self.parts = 2 if self.nibbles else 1
        self.unit = 8 if scales == "nv16" else 4 if weight == "e2m1" else 2
        self.words = self.unit // 4 or 1  # of scales of a tile
        self.scale_bytes = 16 * self.unit

    def scale_registers(self, groups):
        """Registers of scales of groups of 16 rows."""
        return (groups + 1) // 2 * self.words

    def token_registers(self, groups):
        """Registers of scales of groups of 8 tokens."""
        return (groups + 3) // 4 * self.words

    def scale_offset(self, lane):
        """Where the scales that a lane loads are among those of two groups of 16 rows."""
        return (lane // 2 % 2) * self.scale_bytes + (lane // 4 * 2 + lane % 2) * self.unit

    def token_offset(self, lane):
        """Where the scales that a lane loads are among those of 32 tokens."""
        return (lane % 4 * 8 + lane // 4) * self.unit

    def load_scales(self, scale, group, groups, at, step):
        """After a group of 16 rows was used: load what it and the one before have, where a tile begins."""
        if step % 2 == 0 and (group % 2 == 1 or group == groups - 1):
            self._load(scale, group // 2, at, group // 2 * 2 * self.scale_bytes)

    def load_token_scales(self, scale, group, groups, at, step):
        """The same after a group of 8 tokens was used, for it and the three before."""
        if step % 2 == 0 and (group % 4 == 3 or group == groups - 1):
            self._load(scale, group // 4, at, group // 4 * 32 * self.unit)

    def _load(self, scale, index, at, offset):
        if self.unit == 8:
            scale[2 * index], scale[2 * index + 1] = bulk.load_shared_two_words(at, offset)
        else:
            load = bulk.load_shared_word if self.unit == 4 else bulk.load_shared_half
            scale[index] = load(at, offset)

    def _scales(self, scale, index, step, part):
        """The word and the byte that hold for a part of a step."""
        step = step % 2
        if self.words == 2:
            return scale[2 * index + step], 0
        return scale[index], self.unit // 2 * step + (part if self.nibbles else 0)

    def operand(self, words, scale, group, step, part, instruction):
        """The A operand of an instruction."""
        if self.nibbles:
            shifted = [w >> Uint32(2) if part else w << Uint32(2) for w in words]
            words = [w & Uint32(0x3C3C3C3C) for w in shifted]
        return [*words, *self._scales(scale, group // 2, step, part), group % 2]

    def token_operand(self, words, scale, group, step, part):
        """The B operand of an instruction."""
        return [*words, *self._scales(scale, group // 4, step, part), group % 4]
