"""Operands of the weight: from the four words that a lane has of 16 rows and a step of 32 bytes of K to registers.

A step has `parts`, each of which goes with what is loaded of the tokens at a time, and a part feeds `instructions`.
"""

from __future__ import annotations

from b12x_core.kernels import bulk, decode


class Stored:
    """A weight that is multiplied as it is stored."""

    parts = instructions = 1
    scale_bytes = 0

    def operand(self, words, scale, group, step, part, instruction):
        """The A operand of an instruction."""
        return words


class Widened:
    """A weight of 8 bits without scales in the loop.

    Args:
        activation: 16-bit type that it is decoded to.
        parts, instructions: one of them is 2.
    """

    scale_bytes = 0

    def __init__(self, activation, parts, instructions):
        self.decode = decode.DECODE["e4m3", activation]
        self.parts = parts
        self.instructions = instructions

    def operand(self, words, scale, group, step, part, instruction):
        """The A operand of an instruction."""
        first = 2 * (part + instruction)
        top, bottom = self.decode(words[first]), self.decode(words[first + 1])
        return [top[0], bottom[0], top[1], bottom[1]]


class Scaled:
    """A weight of 8 or 4 bits that is decoded with scales of blocks along K.

    Attributes:
        scale_bytes: bytes of scales of 16 rows in a packed tile.
    """

    parts = 2

    def __init__(self, weight, activation, scales):
        self.place = decode.PLACE[weight]
        self.codes = decode.scale_codes(weight, scales)
        self.activation = activation
        self.instructions = 2 if weight == "e2m1" else 1
        self.scale_bytes = self.codes.group_bytes

    def scale_offset(self, lane):
        """Where a lane's scales are among those of 16 rows."""
        return self.codes.lane_offset(lane)

    def scale_registers(self, groups):
        """Registers of scales of groups of 16 rows."""
        return groups

    def load_scales(self, scale, group, groups, at, step):
        """After a group of 16 rows was used: load the word that it has in the tile that a step begins."""
        if step % 2 == 0:
            scale[group] = bulk.load_shared_word(at, group * self.scale_bytes)

    def operand(self, words, scale, group, step, part, instruction):
        """The A operand of an instruction."""
        both = []
        for half in (0, 1):
            factor = self.codes.expand(scale[group], 2 * (step % 2) + half, self.activation)
            pairs = self.place(words[2 * part + half], self.activation)[2 * instruction : 2 * instruction + 2]
            both.append([decode.multiply(self.activation, pair, factor) for pair in pairs])
        top, bottom = both
        return [top[0], bottom[0], top[1], bottom[1]]
