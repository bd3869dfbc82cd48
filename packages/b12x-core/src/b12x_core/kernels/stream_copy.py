"""The stages of `linear_stream` and the warp that fills them.

A stage has some pieces of a tile: 128 bytes of K of its weight rows, as they are packed, and the same K of the tokens,
swizzled for `ldmatrix`; with scales of blocks for both operands, the scales of the tokens besides.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync

from b12x_core.kernels import bulk
from b12x_core.kernels.stream_work import segment_of
from b12x_core.planning.linear import K_TILE_BYTES, TILE_ROWS, LinearConfig

PIECE_TILES = 2
"""Packed tiles along K of a piece: 128 of K for 8-bit weights, as block scales have it."""

X_ROW = 128
"""Bytes of a token in a row of shared memory: the width of the swizzle."""

TILE_BYTES = TILE_ROWS * K_TILE_BYTES
"""Bytes of a packed tile."""

_L2_AHEAD = 49152  # bytes of weights a block asks into L2 beyond those in the ring, while it waits


class StreamRing:
    """The ring of one configuration.

    Attributes:
        pieces: pieces of a stage.
        x_rows: rows of `X_ROW` bytes that a token has in a piece.
        tile_bytes: bytes of a packed tile, or of the part of it that a tile of fewer rows uses.
        w_bytes, x_bytes, scale_bytes: of a stage: weights, tokens, scales of tokens.
        x_scales: whether there are scales of tokens.
        bytes: shared memory, without barriers.
    """

    def __init__(self, config: LinearConfig):
        self.config = c = config
        widened = c.weight != c.activation
        self.pieces = c.k_tiles // PIECE_TILES
        self.x_rows = 2 if widened else 1
        self.tile_bytes = min(c.rows, TILE_ROWS) * K_TILE_BYTES
        self.w_bytes = c.rows * K_TILE_BYTES * c.k_tiles
        self.x_bytes = self.pieces * self.x_rows * c.tokens * X_ROW
        self.x_scales = c.scales == "block" and not widened
        self.scale_bytes = self.pieces * c.tokens * 4 if self.x_scales else 0
        self.bytes = c.stages * (self.w_bytes + self.x_bytes + self.scale_bytes)

    @cute.jit
    def fill(
        self, copy_x, x_map, w, x_scale, w_ring, x_ring, x_scale_ring, full, empty, share, segments, per_tile,
        token_tile, lane,
    ):  # fmt: skip
        """Keep the ring full."""
        c = self.config
        x_shared = cute.make_tensor(
            cute.recast_ptr(x_ring, cute.make_swizzle(3, 4, 3), dtype=Uint8),
            cute.make_layout(
                (c.tokens, X_ROW, c.stages * self.pieces * self.x_rows), stride=(X_ROW, 1, c.tokens * X_ROW)
            ),
        )
        tiles = cute.local_tile(x_map, (c.tokens, X_ROW), (None, None))
        to, source = cpasync.tma_partition(
            copy_x, 0, cute.make_layout(1), cute.group_modes(x_shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        policy = bulk.stream_policy()
        index = Int32(0)
        tile, piece, left = segment_of(index, share, per_tile)
        # weights do not depend on the kernel in front: the first of them are asked for before it has ended
        for s in cutlass.range_constexpr(c.stages):
            if index < segments:
                count = cutlass.min(left, self.pieces)
                self.expect(w, full, Int32(s), tile, count, x_scale, token_tile, lane)
                self.copy_w(w, w_ring, full, policy, Int32(s), tile, piece, count, lane)
                piece = piece + count
                left = left - count
                if left == 0:
                    index = index + 1
                    tile, piece, left = segment_of(index, share, per_tile)
        if index < segments:
            self.prefetch(w, tile, piece, cutlass.min(left, _L2_AHEAD // (c.rows * 128)), lane)
        cute.arch.griddepcontrol_wait()
        x_index = Int32(0)
        _, x_piece, x_left = segment_of(x_index, share, per_tile)
        for s in cutlass.range_constexpr(c.stages):
            if x_index < segments:
                count = cutlass.min(x_left, self.pieces)
                self.copy_tokens(
                    copy_x, to, source, x_scale, x_scale_ring, full, Int32(s), x_piece, count, token_tile, lane
                )
                x_piece = x_piece + count
                x_left = x_left - count
                if x_left == 0:
                    x_index = x_index + 1
                    _, x_piece, x_left = segment_of(x_index, share, per_tile)
        stage, phase = Int32(0), Int32(0)
        while index < segments:
            count = cutlass.min(left, self.pieces)
            cute.arch.mbarrier_wait(empty + stage, phase)
            self.expect(w, full, stage, tile, count, x_scale, token_tile, lane)
            self.copy_w(w, w_ring, full, policy, stage, tile, piece, count, lane)
            self.copy_tokens(copy_x, to, source, x_scale, x_scale_ring, full, stage, piece, count, token_tile, lane)
            piece = piece + count
            left = left - count
            if left == 0:
                index = index + 1
                tile, piece, left = segment_of(index, share, per_tile)
            stage = stage + 1
            if stage == c.stages:
                stage = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def expect(self, w, full, stage, tile, count, x_scale, token_tile, lane):
        """Tell the barrier of a stage how many bytes will come."""
        c = self.config
        size = count * (self.x_rows * c.tokens * X_ROW)
        if cutlass.const_expr(self.x_scales):
            size = size + count * self.present_scale_bytes(x_scale, token_tile)
        row_tiles = Int32(1)
        if cutlass.const_expr(c.rows > TILE_ROWS):
            row_tiles = cutlass.min(Int32(w.shape[0]) - tile * (c.rows // TILE_ROWS), c.rows // TILE_ROWS)
        size = size + row_tiles * (count * (PIECE_TILES * self.tile_bytes))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
        cute.arch.sync_warp()

    @cute.jit
    def copy_w(self, w, w_ring, full, policy, stage, tile, piece, count, lane):
        """Ask for the weights of a stage.

        Where the last piece of a row has but one tile, that tile comes twice: tokens are zero there, and any weight
        does.
        """
        c = self.config
        k_tiles = Int32(w.shape[1])
        barrier = full.toint() + stage * 8
        at = w_ring.toint() + stage * self.w_bytes
        first = piece * PIECE_TILES
        if cutlass.const_expr(c.rows < TILE_ROWS):
            if lane < count * PIECE_TILES:
                k_tile = cutlass.min(first + lane, k_tiles - 1)
                source = self.part_address(w, tile, k_tile)
                bulk.bulk_copy(at + lane * self.tile_bytes, source, Int32(self.tile_bytes), barrier, policy)
        else:
            present = cutlass.min(count * PIECE_TILES, k_tiles - first)
            group = tile * (c.rows // TILE_ROWS) + lane
            if lane < c.rows // TILE_ROWS and group < Int32(w.shape[0]):
                at = at + lane * (c.k_tiles * TILE_BYTES)
                source = w.iterator.toint() + (Int64(group) * Int64(k_tiles) + Int64(first)) * TILE_BYTES
                bulk.bulk_copy(at, source, present * TILE_BYTES, barrier, policy)
                if present < count * PIECE_TILES:
                    last = present * TILE_BYTES
                    bulk.bulk_copy(at + last, source + Int64(last - TILE_BYTES), Int32(TILE_BYTES), barrier, policy)

    @cute.jit
    def part_address(self, w, tile, k_tile):
        """Where a tile of fewer rows than a packed tile has its part of that."""
        parts = TILE_ROWS // self.config.rows
        group = tile // parts
        return (
            w.iterator.toint()
            + (Int64(group) * Int64(w.shape[1]) + Int64(k_tile)) * TILE_BYTES
            + Int64((tile - group * parts) * self.tile_bytes)
        )

    @cute.jit
    def prefetch(self, w, tile, piece, count, lane):
        """Ask for weights of `count` pieces of a tile into L2."""
        c = self.config
        k_tiles = Int32(w.shape[1])
        policy = bulk.keep_policy()
        first = piece * PIECE_TILES
        last = cutlass.min(first + count * PIECE_TILES, k_tiles)
        if cutlass.const_expr(c.rows < TILE_ROWS):
            for k_tile in cutlass.range(first + lane, last, 32, unroll=1):
                bulk.prefetch_l2(self.part_address(w, tile, k_tile), Int32(self.tile_bytes), policy)
        else:
            group = tile * (c.rows // TILE_ROWS) + lane
            if lane < c.rows // TILE_ROWS and group < Int32(w.shape[0]):
                source = w.iterator.toint() + (Int64(group) * Int64(k_tiles) + Int64(first)) * TILE_BYTES
                bulk.prefetch_l2(source, (last - first) * TILE_BYTES, policy)

    @cute.jit
    def present_scale_bytes(self, x_scale, token_tile):
        """Bytes of scales of this tile's tokens that exist, for one block of K."""
        c = self.config
        return cutlass.min(Int32(x_scale.shape[1]) - token_tile * c.tokens, c.tokens) * 4

    @cute.jit
    def copy_tokens(self, copy_x, to, source, x_scale, x_scale_ring, full, stage, piece, count, token_tile, lane):
        """Ask for the tokens of a stage, and their scales."""
        c = self.config
        for p in cutlass.range_constexpr(self.pieces):
            if p < count:
                for r in cutlass.range_constexpr(self.x_rows):
                    cute.copy(
                        copy_x,
                        source[None, token_tile, (piece + p) * self.x_rows + r],
                        to[None, (stage * self.pieces + p) * self.x_rows + r],
                        tma_bar_ptr=full + stage,
                    )
                if cutlass.const_expr(self.x_scales):
                    if lane == 0:
                        bulk.bulk_copy(
                            x_scale_ring.toint() + stage * self.scale_bytes + p * (c.tokens * 4),
                            x_scale.iterator.toint()
                            + (Int64(piece + p) * Int64(x_scale.stride[0]) + Int64(token_tile * c.tokens)) * 4,
                            self.present_scale_bytes(x_scale, token_tile),
                            full.toint() + stage * 8,
                        )
