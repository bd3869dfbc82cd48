"""What `linear_stream` does with a piece of a tile: loads of fragments, decoding, matrix instructions.

A product is made for a configuration and gives the loop its `multiply`. Which one serves is a matter of the operand
types and of the scales that are applied in the loop (`product_for`); the loop is the same for all.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from b12x_core.kernels import bulk, decode, mma
from b12x_core.kernels.block_mma import BLOCK_MMA, BlockOperands
from b12x_core.kernels.stream_copy import X_ROW, StreamRing
from b12x_core.planning.linear import SCALE_BLOCK, LinearConfig


class Product:
    """What products share: where a lane finds its operands.

    Attributes:
        row_groups: groups of 16 rows of a warp.
        token_groups: groups of 8 tokens.
    """

    def __init__(self, config: LinearConfig, ring: StreamRing):
        self.config, self.ring = config, ring
        self.row_groups = config.rows // 16 // config.warps_n
        self.token_groups = config.tokens // 8
        self.instruction = mma.BY_ACTIVATION.get(config.activation)

    def weight_at(self, w_ring, group, warp_k):
        """Shared-memory address of a warp's first group of rows, of its first piece of stage 0."""
        ring = self.ring
        return (
            w_ring.toint()
            + (group // 4) * (self.config.k_tiles * ring.tile_bytes)
            + (group % 4) * 1024
            + warp_k * (ring.piece_tiles * ring.tile_bytes)
        )

    def scales_at(self, w_ring, group, warp_k, group_bytes):
        """The same of the scales in packed tiles, of which a group of 16 rows has so many bytes."""
        return self.weight_at(w_ring, group, warp_k) + self.ring.code_bytes - (group % 4) * (1024 - group_bytes)

    def tile_offset(self, piece, tile):
        """How far a packed tile of a piece is behind the first."""
        return (piece * self.ring.piece_tiles + tile) * self.ring.tile_bytes

    def group_offset(self, i, bytes_of_group=1024):
        """How far the warp's i-th group of rows is behind its first."""
        return (i // 4) * (self.config.k_tiles * self.ring.tile_bytes) + (i % 4) * bytes_of_group

    def tokens_at(self, x_ring, warp_k):
        """Shared-memory address of the tokens of a warp's first piece of stage 0."""
        return x_ring.toint() + warp_k * (self.ring.x_rows * self.config.tokens * X_ROW)

    def matrices_at(self, x_ring, warp_k, lane):
        """Where lanes 8 i to 8 i + 7 find the i-th 16 bytes of tokens 0 to 7, as ldmatrix wants it."""
        token = lane % 8
        return self.tokens_at(x_ring, warp_k) + token * X_ROW + (((lane // 8) ^ token) * 16)

    def add(self, to, a, b, i, j):
        """Add a matrix product to the sums of the warp's i-th rows and j-th tokens."""
        at = (i * self.token_groups + j) * 4
        result = self.instruction(a, b, [to[at + r] for r in range(4)])
        for r in range(4):
            to[at + r] = result[r]


class PlainProduct(Product):
    """Operands as they are stored, or 8-bit weights decoded beside tokens of 16 bits; no scales in the loop.

    Attributes:
        parts: instructions that a step of 32 bytes of K feeds.
    """

    def __init__(self, config: LinearConfig, ring: StreamRing):
        super().__init__(config, ring)
        self.decode = decode.DECODE.get((config.weight, config.activation))
        self.parts = 2 if config.weight != config.activation else 1

    def addresses(self, w_ring, x_ring, scale_ring, group, warp_k, lane):
        """Of a lane, for stage 0: weights, their scales, tokens, their scales."""
        return (
            self.weight_at(w_ring, group, warp_k) + lane * 16,
            w_ring.toint(),
            self.matrices_at(x_ring, warp_k, lane),
            scale_ring.toint(),
        )

    def scales(self, at, piece):
        """What the operands of a piece are scaled by: nothing."""

    def operand(self, words, scales, i, tile, step, part):
        """The A operand of an instruction: the i-th rows of a step of a packed tile, or a part of that."""
        if self.decode is None:
            return words
        top, bottom = self.decode(words[2 * part]), self.decode(words[2 * part + 1])
        return [top[0], bottom[0], top[1], bottom[1]]

    def token_operand(self, words, scales, j, tile, step, part):
        """The B operand that goes with it."""
        return words

    @cute.jit
    def multiply(self, acc, at, piece, factor):
        """Add a piece to `acc`.

        Args:
            acc: fp32, 4 for each group of rows and of tokens.
            at: `addresses` of the stage.
            piece: which of the stage, a constant, counted from that of the warp.
            factor: scale of the weight, where a piece has one.
        """
        ring, tokens = self.ring, self.config.tokens
        w_at, _, x_at, _ = at
        x_tile = ring.x_rows * X_ROW // ring.piece_tiles  # bytes of a token, in a packed tile
        # a packed tile has two steps of 32 bytes; 64 bytes of a token serve two instructions
        weights = [
            [
                [
                    bulk.load_shared(w_at, self.tile_offset(piece, tile) + self.group_offset(i) + step * 512)
                    for i in range(self.row_groups)
                ]
                for step in range(2)
            ]
            for tile in range(ring.piece_tiles)
        ]
        scales = self.scales(at, piece)
        for tile in cutlass.range_constexpr(ring.piece_tiles):
            for half in cutlass.range_constexpr(x_tile // 64):
                x_byte = tile * x_tile + half * 64  # in the token's bytes of the piece
                address = x_at ^ (x_byte % X_ROW)
                offset = (piece * ring.x_rows + x_byte // X_ROW) * (tokens * X_ROW)
                for j in cutlass.range_constexpr(self.token_groups):
                    b = bulk.load_matrices(address, offset + j * (8 * X_ROW))
                    for q in cutlass.range_constexpr(2):
                        step, part = (half, q) if self.parts == 2 else (q, 0)
                        words = self.token_operand(b[2 * q : 2 * q + 2], scales, j, tile, step, part)
                        for i in cutlass.range_constexpr(self.row_groups):
                            self.add(
                                acc, self.operand(weights[tile][step][i], scales, i, tile, step, part), words, i, j
                            )


class BlockScaledProduct(Product):
    """A product of pieces of 128 of K, each times an fp32 scale of the weight, and one of the token if it has any."""

    def __init__(self, config: LinearConfig, ring: StreamRing):
        super().__init__(config, ring)
        self.inner = PlainProduct(config, ring)

    def addresses(self, w_ring, x_ring, scale_ring, group, warp_k, lane):
        """As in `PlainProduct`."""
        w_at, s_at, x_at, _ = self.inner.addresses(w_ring, x_ring, scale_ring, group, warp_k, lane)
        return w_at, s_at, x_at, scale_ring.toint() + warp_k * (self.config.tokens * 4) + (lane % 4) * 8

    @cute.jit
    def multiply(self, acc, at, piece, factor):
        """As in `PlainProduct`."""
        part = cute.make_rmem_tensor((self.row_groups * self.token_groups * 4,), Float32)
        part.fill(0.0)
        self.inner.multiply(part, at, piece, factor)
        for j in cutlass.range_constexpr(self.token_groups):
            pair = (factor, factor)
            if cutlass.const_expr(self.ring.x_scales):
                pair = bulk.load_shared_pair(at[3], piece * (self.config.tokens * 4) + j * 32)
                pair = (pair[0] * factor, pair[1] * factor)
            for i in cutlass.range_constexpr(self.row_groups):
                to = (i * self.token_groups + j) * 4
                for r in cutlass.range_constexpr(4):
                    acc[to + r] = acc[to + r] + part[to + r] * pair[r % 2]


class DecodedProduct(Product):
    """4-bit weights with a scale for each 16 or 32 of K, decoded to 16 bits in registers.

    In a step of 64 k lane 4 g + t has k 16 t to 16 t + 15 of rows g and g + 8, and reads the same k of token g: 16
    bytes twice, from rows of 128 bytes whose chunks are exchanged as the copy engine swizzles them.
    """

    def __init__(self, config: LinearConfig, ring: StreamRing):
        super().__init__(config, ring)
        self.codes = decode.scale_codes(config.weight, config.scales)

    def addresses(self, w_ring, x_ring, scale_ring, group, warp_k, lane):
        """As in `PlainProduct`."""
        token = lane // 4
        return (
            self.weight_at(w_ring, group, warp_k) + lane * 16,
            self.scales_at(w_ring, group, warp_k, self.codes.group_bytes) + self.codes.lane_offset(lane),
            self.tokens_at(x_ring, warp_k) + token * X_ROW + ((lane % 4 * 2) ^ token) * 16,
            scale_ring.toint(),
        )

    @cute.jit
    def multiply(self, acc, at, piece, factor):
        """As in `PlainProduct`."""
        c, ring = self.config, self.ring
        w_at, s_at, x_at, _ = at
        for tile in cutlass.range_constexpr(ring.piece_tiles):
            first = self.tile_offset(piece, tile)
            scales = [
                bulk.load_shared_word(s_at, first + self.group_offset(i, self.codes.group_bytes))
                for i in range(self.row_groups)
            ]
            words = [
                [bulk.load_shared(w_at, first + self.group_offset(i) + step * 512) for i in range(self.row_groups)]
                for step in range(2)
            ]
            for step in cutlass.range_constexpr(2):
                factors = [
                    [self.codes.expand(word, 2 * step + side, c.activation) for side in range(2)] for word in scales
                ]
                row = (piece * ring.x_rows + tile * 2 + step) * (c.tokens * X_ROW)
                for half in cutlass.range_constexpr(2):
                    x = [bulk.load_shared(x_at ^ (half * 16), row + j * (8 * X_ROW)) for j in range(self.token_groups)]
                    for i in cutlass.range_constexpr(self.row_groups):
                        top, bottom = (
                            [
                                decode.multiply(c.activation, bits, factors[i][side])
                                for bits in decode.place_e2m1(words[step][i][2 * half + side], c.activation)
                            ]
                            for side in range(2)
                        )
                        for q in cutlass.range_constexpr(2):
                            a = [top[2 * q], bottom[2 * q], top[2 * q + 1], bottom[2 * q + 1]]
                            for j in cutlass.range_constexpr(self.token_groups):
                                self.add(acc, a, x[j][2 * q : 2 * q + 2], i, j)


class ScaledWideProduct(PlainProduct):
    """8-bit weights with a scale for each 32 of K, decoded to 16 bits in registers."""

    def __init__(self, config: LinearConfig, ring: StreamRing):
        super().__init__(config, ring)
        self.codes = decode.scale_codes(config.weight, config.scales)

    def addresses(self, w_ring, x_ring, scale_ring, group, warp_k, lane):
        """As in `PlainProduct`."""
        w_at, _, x_at, x_scale_at = super().addresses(w_ring, x_ring, scale_ring, group, warp_k, lane)
        s_at = self.scales_at(w_ring, group, warp_k, self.codes.group_bytes) + self.codes.lane_offset(lane)
        return w_at, s_at, x_at, x_scale_at

    def scales(self, at, piece):
        """Words of scales, by packed tile and group of rows."""
        return [
            [
                bulk.load_shared_word(
                    at[1], self.tile_offset(piece, tile) + self.group_offset(i, self.codes.group_bytes)
                )
                for i in range(self.row_groups)
            ]
            for tile in range(self.ring.piece_tiles)
        ]

    def operand(self, words, scales, i, tile, step, part):
        """As in `PlainProduct`, times the scales of the step."""
        kind = self.config.activation
        top, bottom = (
            [
                decode.multiply(kind, bits, self.codes.expand(scales[tile][i], 2 * step + side, kind))
                for bits in decode.place_e4m3(words[2 * part + side], kind)
            ]
            for side in range(2)
        )
        return [top[0], bottom[0], top[1], bottom[1]]


class NativeProduct(PlainProduct):
    """Operands whose scales of blocks the instruction takes, of weights and of tokens."""

    def __init__(self, config: LinearConfig, ring: StreamRing):
        super().__init__(config, ring)
        self.decode = None
        self.operands = BlockOperands(config.weight, config.activation, config.scales)
        self.parts = self.operands.parts
        self.instruction = BLOCK_MMA[config.weight, config.activation, config.scales]
        if self.row_groups > 4:
            raise ValueError(f"{config.name}: a warp has more than the 64 rows of a packed tile")

    def addresses(self, w_ring, x_ring, scale_ring, group, warp_k, lane):
        """As in `PlainProduct`."""
        operands, ring = self.operands, self.ring
        w_at, _, x_at, _ = super().addresses(w_ring, x_ring, scale_ring, group, warp_k, lane)
        return (
            w_at,
            self.scales_at(w_ring, group, warp_k, operands.scale_bytes) + operands.scale_offset(lane),
            x_at,
            scale_ring.toint()
            + warp_k * (ring.piece_tiles * self.config.tokens * operands.unit)
            + operands.token_offset(lane),
        )

    def scales(self, at, piece):
        """Words of scales by packed tile: of two groups of rows in turn, and of four groups of tokens."""
        operands = self.operands
        found = []
        for tile in range(self.ring.piece_tiles):
            rows = [None] * operands.scale_registers(self.row_groups)
            for i in range(self.row_groups):
                operands.load_scales(rows, i, self.row_groups, at[1] + self.tile_offset(piece, tile), 0)
            tokens = [None] * operands.token_registers(self.token_groups)
            behind = (piece * self.ring.piece_tiles + tile) * (self.config.tokens * operands.unit)
            for j in range(self.token_groups):
                operands.load_token_scales(tokens, j, self.token_groups, at[3] + behind, 0)
            found.append((rows, tokens))
        return found

    def operand(self, words, scales, i, tile, step, part):
        """As in `PlainProduct`, with the scales."""
        return self.operands.operand(words, scales[tile][0], i, step, part, 0)

    def token_operand(self, words, scales, j, tile, step, part):
        """As in `PlainProduct`, with the scales."""
        return self.operands.token_operand(words, scales[tile][1], j, step, part)


def product_for(config: LinearConfig, ring: StreamRing) -> Product:
    """The product of a configuration."""
    if config.scales == "block":
        return BlockScaledProduct(config, ring)
    if ring.native:
        return NativeProduct(config, ring)
    if config.scales in SCALE_BLOCK:
        return (DecodedProduct if config.weight == "e2m1" else ScaledWideProduct)(config, ring)
    return PlainProduct(config, ring)
