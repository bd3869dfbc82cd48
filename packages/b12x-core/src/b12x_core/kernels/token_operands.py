"""Operands of tokens: from rows in shared memory, swizzled by their tensor map, to registers of the matrix instruction.

A warp has groups of 8 tokens. Both classes load what a part of a step takes of every token; one ahead of its use, the
other in place of what was just used.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from b12x_core.kernels import bulk


class MatrixTokens:
    """Elements in their own order, by `ldmatrix`: 32 bytes of each token a part, in two buffers.

    Args:
        groups: groups of 8 tokens of a warp, even.
        row_bytes: of a token in a stage, 64 or 128.
    """

    part_bytes = 32

    def __init__(self, groups, row_bytes):
        self.groups = groups
        self.row_bytes = row_bytes
        self.shape = (2, groups // 2, 4)

    def offset(self, lane):
        """What a lane's address adds to that of the warp's first token, in a tile that is aligned to 1024 bytes."""
        # lanes 0-7 and 8-15 give the first and second 16 bytes of tokens 0-7, lanes 16-31 those of tokens 8-15
        row = (lane // 16) * 8 + lane % 8
        place = row % 8 if self.row_bytes == 128 else (row // 2) % 4
        return row * self.row_bytes + (((lane // 8) % 2) ^ place) * 16

    @cute.jit
    def load(self, b, part: cutlass.Constexpr, at):
        """All of a part into its buffer of b."""
        for j in cutlass.range_constexpr(self.groups // 2):
            words = bulk.load_matrices(at ^ (part * 32), j * 16 * self.row_bytes)
            for r in cutlass.range_constexpr(4):
                b[part % 2, j, r] = words[r]

    @cute.jit
    def load_ahead(self, b, part: cutlass.Constexpr, at):
        """Before the part in front is multiplied: all of a part."""
        self.load(b, part, at)

    @cute.jit
    def replace(self, b, group: cutlass.Constexpr, part: cutlass.Constexpr, at):
        """After a group was used for the last time: nothing."""

    def operand(self, b, part, group, instruction):
        """The two registers of a group."""
        return [b[part % 2, group // 2, 2 * (group % 2) + r] for r in (0, 1)]


class ChunkTokens:
    """Elements in the order that `ops.packing` gives a 4-bit weight beside 16-bit tokens.

    In 64 of K lane 4 g + t has 16 neighbours of token g; a part is half of them, 16 bytes a lane for two instructions.
    Rows of 128 bytes; as one part of them lies where banks differ, no load has conflicts.
    """

    part_bytes = 64

    def __init__(self, groups, row_bytes):
        self.groups = groups
        self.row_bytes = row_bytes
        self.shape = (groups, 4)

    def offset(self, lane):
        """As in `MatrixTokens`."""
        return (lane // 4) * self.row_bytes + ((2 * (lane % 4)) ^ (lane // 4)) * 16

    @cute.jit
    def load(self, b, part: cutlass.Constexpr, at):
        """All of a part."""
        for j in cutlass.range_constexpr(self.groups):
            self.replace(b, j, part, at)

    @cute.jit
    def load_ahead(self, b, part: cutlass.Constexpr, at):
        """Nothing: there is one buffer."""

    @cute.jit
    def replace(self, b, group: cutlass.Constexpr, part: cutlass.Constexpr, at):
        """Load what a group has of a part."""
        words = bulk.load_shared(at ^ (part * 16), group * 8 * self.row_bytes)
        for r in cutlass.range_constexpr(4):
            b[group, r] = words[r]

    def operand(self, b, part, group, instruction):
        """The two registers of a group for one of the two instructions."""
        return [b[group, 2 * instruction + r] for r in (0, 1)]
