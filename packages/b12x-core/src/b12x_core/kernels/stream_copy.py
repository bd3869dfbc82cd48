"""The stages of `linear_stream` and the warp that fills them.

A stage has some pieces of a tile: one or two packed tiles of its weight rows, as they are stored, and the same K of the
tokens, swizzled for `ldmatrix`; with scales of blocks for both operands, the scales of the tokens besides.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync

from b12x_core.kernels import bulk
from b12x_core.kernels.stream_work import segment_of
from b12x_core.planning.linear import K_TILE_BYTES, SCALE_BLOCK, TILE_ROWS, WEIGHT_BITS, LinearConfig

X_ROW = 128
"""Bytes of a token in a row of shared memory: the width of the swizzle."""

_L2_AHEAD = 49152  # bytes of weights a block asks into L2 beyond those in the ring, while it waits


class StreamRing:
    """The ring of one configuration.

    Attributes:
        piece_tiles: packed tiles along K of a piece. A token has 128 bytes of such a piece or more, and fp32 scales of
            blocks are those of a piece.
        pieces: pieces of a stage.
        x_rows: rows of `X_ROW` bytes that a token has in a piece.
        code_bytes, tile_bytes: of a packed tile, without and with its scales; or of the part that a tile of fewer rows
            uses.
        w_bytes, x_bytes, scale_bytes: of a stage: weights, tokens, scales of tokens.
        native: whether the matrix instruction takes scales of blocks, which are then bytes.
        x_scales: whether there are scales of tokens.
        scale_rows: rows of these of a piece.
        scale_unit: bytes that a token has in such a row.
        bytes: shared memory, without barriers.
    """

    def __init__(self, config: LinearConfig):
        self.config = c = config
        x_tile = c.k_tile * WEIGHT_BITS[c.activation] // 8  # bytes of a token, beside a packed tile
        self.piece_tiles = 1 if c.scales in SCALE_BLOCK and x_tile >= X_ROW else 2
        self.pieces = c.k_tiles // self.piece_tiles
        self.x_rows = self.piece_tiles * x_tile // X_ROW
        self.part = min(c.rows, TILE_ROWS)
        self.code_bytes = self.part * K_TILE_BYTES
        self.tile_bytes = c.tile_bytes * self.part // TILE_ROWS
        self.w_bytes = c.rows // self.part * self.tile_bytes * c.k_tiles
        self.x_bytes = self.pieces * self.x_rows * c.tokens * X_ROW
        block = SCALE_BLOCK.get(c.scales)
        self.native = block is not None and WEIGHT_BITS[c.activation] < 16
        self.x_scales = self.native or (c.scales == "block" and c.weight == c.activation)
        self.scale_rows = self.piece_tiles if self.native else 1
        self.scale_unit = c.k_tile // block if self.native and block else 4
        self.scale_bytes = self.pieces * self.scale_rows * c.tokens * self.scale_unit if self.x_scales else 0
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
        ahead = Int32(_L2_AHEAD // (self.w_bytes // self.pieces))
        next_index, next_tile, next_piece, next_size = index, tile, piece, left
        while next_index < segments and ahead > 0:
            self.prefetch(w, next_tile, next_piece, cutlass.min(next_size, ahead), lane)
            ahead = ahead - next_size
            next_index = next_index + 1
            next_tile, next_piece, next_size = segment_of(next_index, share, per_tile)
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
            size = size + count * (self.scale_rows * self.present_scale_bytes(x_scale, token_tile))
        row_tiles = Int32(1)
        if cutlass.const_expr(c.rows > TILE_ROWS):
            row_tiles = cutlass.min(Int32(w.shape[0]) - tile * (c.rows // TILE_ROWS), c.rows // TILE_ROWS)
        size = size + row_tiles * (count * (self.piece_tiles * self.tile_bytes))
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
        first = piece * self.piece_tiles
        if cutlass.const_expr(c.rows < TILE_ROWS):
            if lane < count * self.piece_tiles:
                k_tile = cutlass.min(first + lane, k_tiles - 1)
                at = at + lane * self.tile_bytes
                codes, scales = self.part_addresses(w, tile, k_tile)
                bulk.bulk_copy(at, codes, Int32(self.code_bytes), barrier, policy)
                if cutlass.const_expr(self.tile_bytes > self.code_bytes):
                    size = Int32(self.tile_bytes - self.code_bytes)
                    bulk.bulk_copy(at + self.code_bytes, scales, size, barrier, policy)
        else:
            present = cutlass.min(count * self.piece_tiles, k_tiles - first)
            group = tile * (c.rows // TILE_ROWS) + lane
            if lane < c.rows // TILE_ROWS and group < Int32(w.shape[0]):
                at = at + lane * (c.k_tiles * self.tile_bytes)
                source = self.tile_address(w, group, first)
                bulk.bulk_copy(at, source, present * self.tile_bytes, barrier, policy)
                if cutlass.const_expr(self.piece_tiles > 1):
                    if present < count * self.piece_tiles:
                        last = present * self.tile_bytes
                        size = Int32(self.tile_bytes)
                        bulk.bulk_copy(at + last, source + Int64(last - self.tile_bytes), size, barrier, policy)

    @cute.jit
    def tile_address(self, w, row_tile, k_tile):
        """Where a packed tile is."""
        return w.iterator.toint() + (Int64(row_tile) * Int64(w.shape[1]) + Int64(k_tile)) * Int64(
            self.config.tile_bytes
        )

    @cute.jit
    def part_addresses(self, w, tile, k_tile):
        """Where a tile of fewer rows than a packed tile has its part of that: of the codes, of the scales."""
        parts = TILE_ROWS // self.config.rows
        row_tile = tile // parts
        part = tile - row_tile * parts
        whole = self.tile_address(w, row_tile, k_tile)
        return (
            whole + Int64(part * self.code_bytes),
            whole + Int64(parts * self.code_bytes + part * (self.tile_bytes - self.code_bytes)),
        )

    @cute.jit
    def prefetch(self, w, tile, piece, count, lane):
        """Ask for weights of `count` pieces of a tile into L2."""
        c = self.config
        k_tiles = Int32(w.shape[1])
        policy = bulk.keep_policy()
        first = piece * self.piece_tiles
        last = cutlass.min(first + count * self.piece_tiles, k_tiles)
        if cutlass.const_expr(c.rows < TILE_ROWS):
            for k_tile in cutlass.range(first + lane, last, 32, unroll=1):
                codes, scales = self.part_addresses(w, tile, k_tile)
                bulk.prefetch_l2(codes, Int32(self.code_bytes), policy)
                if cutlass.const_expr(self.tile_bytes > self.code_bytes):
                    bulk.prefetch_l2(scales, Int32(self.tile_bytes - self.code_bytes), policy)
        else:
            group = tile * (c.rows // TILE_ROWS) + lane
            if lane < c.rows // TILE_ROWS and group < Int32(w.shape[0]):
                bulk.prefetch_l2(self.tile_address(w, group, first), (last - first) * self.tile_bytes, policy)

    @cute.jit
    def present_scale_bytes(self, x_scale, token_tile):
        """Bytes of scales of this tile's tokens that exist, in one row of them."""
        c = self.config
        return cutlass.min(Int32(x_scale.shape[1]) - token_tile * c.tokens, c.tokens) * self.scale_unit

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
                    # where the last piece lacks a packed tile, it is as in `copy_w`
                    row = (piece + p) * self.scale_rows + lane
                    if lane < self.scale_rows:
                        row = cutlass.min(row, Int32(x_scale.shape[0]) - 1)
                        at = Int64(row) * (Int64(x_scale.stride[0]) * (x_scale.element_type.width // 8))
                        bulk.bulk_copy(
                            x_scale_ring.toint()
                            + stage * self.scale_bytes
                            + (p * self.scale_rows + lane) * (c.tokens * self.scale_unit),
                            x_scale.iterator.toint() + at + Int64(token_tile * (c.tokens * self.scale_unit)),
                            self.present_scale_bytes(x_scale, token_tile),
                            full.toint() + stage * 8,
                        )
