"""The ring of the tiled loop: what is copied into shared memory, in which order, and how it lies there.

A turn of the loop takes `k_tiles` packed tiles along K of every 64 rows, and the same of K of the tokens. A stage of
the ring holds at most 128 bytes of each token, so a turn takes one stage, or two where a weight of 4 bits meets tokens
of 16. The weight comes with the first of them. It has `stages // 2 + 1` slots there: a stage is only filled again when
the one that lies a whole ring back was used, and then that weight was, too.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync

from b12x_core.kernels import bulk, tile_work
from b12x_core.kernels.scales import BLOCK
from b12x_core.planning.linear import TILE_ROWS, WEIGHT_BITS, LinearConfig

_SWIZZLED = 128  # most bytes of a row that a tensor map can swizzle


class TiledRing:
    """The ring of a configuration.

    Attributes:
        tile_bytes: of a packed tile.
        parts: stages of a turn.
        row_bytes: of a token in a stage.
        x_bytes, w_bytes, scale_bytes: of the tokens and of the token scales of a stage, and of the weight of a turn.
        w_slots: weights of turns that there is room for.
        token_scale: bytes of the scales of a token in a stage, 0 without any.
        bytes: of all.
        cost: about how long a turn takes, in units of `tile_work`.
    """

    def __init__(self, config: LinearConfig):
        self.config = c = config
        self.tile_bytes = c.tile_bytes
        turn = c.k_tile * c.k_tiles * WEIGHT_BITS[c.activation] // 8
        self.parts = max(1, turn // _SWIZZLED)
        self.row_bytes = turn // self.parts
        self.x_bytes = c.tokens * self.row_bytes
        self.cost = turn // 64
        self.w_bytes = c.rows // TILE_ROWS * self.tile_bytes * c.k_tiles
        self.w_slots = c.stages if self.parts == 1 else c.stages // 2 + 1
        self.native = c.scales in ("nv16", "mx32") and WEIGHT_BITS[c.activation] < 16
        self.by_block = c.scales == "block" and c.activation == "e4m3"
        self.token_scale = 4 if self.by_block else 0
        if self.native:
            per_block = 16 if c.scales == "nv16" else 32
            self.token_scale = c.k_tile // per_block * c.k_tiles
        self.scale_bytes = c.tokens * self.token_scale
        self.bytes = c.stages * (self.x_bytes + self.scale_bytes + 16) + self.w_slots * self.w_bytes
        if self.row_bytes not in (64, 128) or self.parts > 2 or (self.parts == 2 and c.k_tiles > 1):
            raise ValueError(f"{c.name}: a stage has {self.row_bytes} bytes of each token, not 64 or 128")

    def swizzle(self):
        """How the 16-byte chunks of a stage's rows of tokens are permuted."""
        return cute.make_swizzle(3 if self.row_bytes == 128 else 2, 4, 3)

    def tokens_map(self, x, m, k):
        """Copy atom and tensor of the tensor map of the (m, k) tokens: of bytes, zero beyond them."""
        c = self.config
        bits = WEIGHT_BITS[c.activation]
        if bits >= 8:
            width, pitch = k * (bits // 8), Int64(x.stride[0]) * (bits // 8)
        else:
            width, pitch = (k + 1) // 2, Int64(x.stride[0])  # two elements a byte
        as_bytes = cute.make_tensor(
            cute.recast_ptr(x.iterator, dtype=Uint8),
            cute.make_layout((m, width), stride=(cute.assume(pitch, divby=16), 1)),
        )
        layout = cute.make_composed_layout(
            self.swizzle(), 0, cute.make_layout((c.tokens, self.row_bytes), stride=(self.row_bytes, 1))
        )
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), as_bytes, layout, (c.tokens, self.row_bytes)
        )

    @cute.jit
    def fill(
        self, copy_x, tokens_map, w, x_scale, w_ring, x_ring, scale_ring, full, empty,
        share: cutlass.Constexpr, lane,
    ):  # fmt: skip
        """Keep the ring full. The weight depends on no earlier kernel: the first stages get it before those end."""
        c = self.config
        layout = cute.make_layout((c.tokens, self.row_bytes, c.stages), stride=(self.row_bytes, 1, self.x_bytes))
        shared = cute.make_tensor(cute.recast_ptr(x_ring, self.swizzle(), dtype=Uint8), layout)
        tiled = cute.local_tile(tokens_map, (c.tokens, self.row_bytes), (None, None))
        x_shared, x_global = cpasync.tma_partition(
            copy_x, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiled, 0, 2)
        )
        stage, phase, done, slot = Int32(0), Int32(1), Int32(0), Int32(0)
        ahead = Int32(0)  # turns whose weight is under way
        if share.work > 0:
            index, k, count, _ = tile_work.piece(share, done)
            row_tile, token_tile = tile_work.tile(share, index)
            ahead = cutlass.min(count, (c.stages + self.parts - 1) // self.parts)
            if lane == 0:
                for s in cutlass.range(ahead, unroll=1):
                    self.copy_weights(w, w_ring, full, row_tile, token_tile, k + s, s * self.parts, s, x_scale)
        cute.arch.griddepcontrol_wait()
        while done < share.work:
            index, k, count, taken = tile_work.piece(share, done)
            row_tile, token_tile = tile_work.tile(share, index)
            done = done + taken
            for i in cutlass.range(count, unroll=1):
                for part in cutlass.range_constexpr(self.parts):
                    if cutlass.const_expr(part > 0):
                        cute.arch.mbarrier_wait(empty + stage, phase)
                        if lane == 0:
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.x_bytes)
                    elif ahead > 0:
                        ahead = ahead - 1
                    else:
                        cute.arch.mbarrier_wait(empty + stage, phase)
                        if lane == 0:
                            self.copy_weights(w, w_ring, full, row_tile, token_tile, k + i, stage, slot, x_scale)
                    if cutlass.const_expr(self.token_scale > 0):
                        if lane == 0:
                            self.copy_scales(w, x_scale, scale_ring, full, token_tile, k + i, stage)
                    cute.copy(
                        copy_x,
                        x_global[None, token_tile, (k + i) * self.parts + part],
                        x_shared[None, stage],
                        tma_bar_ptr=full + stage,
                    )
                    stage = stage + 1
                    if stage == c.stages:
                        stage = Int32(0)
                        phase = phase ^ 1
                slot = slot + 1
                if slot == self.w_slots:
                    slot = Int32(0)

    @cute.jit
    def scaled_tokens(self, x_scale, token_tile):
        """Tokens of a tile that have scales: the rows of `x_scale` end earlier than the last tile."""
        c = self.config
        rows = Int32(x_scale.stride[0]) // self.token_unit()
        return cutlass.min(rows - token_tile * c.tokens, c.tokens)

    def token_unit(self):
        """Elements of `x_scale` that a token has in a row of it."""
        return self.token_scale // self.config.k_tiles if self.native else 1

    @cute.jit
    def copy_scales(self, w, x_scale, scale_ring, full, token_tile, k, stage):
        """Start the copy of the token scales of a stage."""
        c = self.config
        rows = self.scaled_tokens(x_scale, token_tile)
        if cutlass.const_expr(self.native):
            unit = self.token_unit()
            for i in cutlass.range_constexpr(c.k_tiles):
                # tokens are zero beyond the last packed tile, and any scale does
                tile = cutlass.min(k * c.k_tiles + i, Int32(w.shape[1]) - 1)
                at = Int64(tile) * Int64(x_scale.stride[0]) + Int64(token_tile * (c.tokens * unit))
                bulk.bulk_copy(
                    scale_ring.toint() + stage * self.scale_bytes + i * (c.tokens * unit),
                    x_scale.iterator.toint() + at,
                    rows * unit,
                    full.toint() + stage * 8,
                )
        else:
            at = Int64((k * (c.k_tile * c.k_tiles)) // BLOCK) * Int64(x_scale.stride[0])
            bulk.bulk_copy(
                scale_ring.toint() + stage * self.scale_bytes,
                x_scale.iterator.toint() + (at + Int64(token_tile * c.tokens)) * 4,
                rows * 4,
                full.toint() + stage * 8,
            )

    @cute.jit
    def copy_weights(self, w, w_ring, full, row_tile, token_tile, k, stage, slot, x_scale):
        """Say how many bytes the first stage of a turn gets in all, and start the copies of its weight."""
        c = self.config
        groups = c.rows // TILE_ROWS
        k_tiles = Int32(w.shape[1])
        first = row_tile * groups
        present = cutlass.min(Int32(w.shape[0]) - first, groups)
        size = present * (self.tile_bytes * c.k_tiles) + self.x_bytes
        if cutlass.const_expr(self.token_scale > 0):
            size = size + self.scaled_tokens(x_scale, token_tile) * self.token_scale
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
        at = w_ring.toint() + slot * self.w_bytes
        source = w.iterator.toint() + (Int64(first) * Int64(k_tiles) + Int64(k * c.k_tiles)) * self.tile_bytes
        for r in cutlass.range_constexpr(groups):
            if r < present:
                self.copy_weight(
                    at + r * (self.tile_bytes * c.k_tiles),
                    source + Int64(k_tiles) * (self.tile_bytes * r),
                    full.toint() + stage * 8,
                    k_tiles - k * c.k_tiles,
                )

    @cute.jit
    def copy_weight(self, at, source, barrier, left):
        """Copy the packed tiles of a stage and 64 rows, of which `left` exist along K.

        In place of those beyond the end the last one comes again: tokens are zero there, and any weight does.
        """
        count, size = self.config.k_tiles, self.tile_bytes
        if cutlass.const_expr(count == 1):
            bulk.bulk_copy(at, source, Int32(size), barrier)
        elif left >= count:
            bulk.bulk_copy(at, source, Int32(size * count), barrier)
        else:
            for i in cutlass.range_constexpr(count):
                tile = cutlass.min(Int32(i), left - 1)
                bulk.bulk_copy(at + i * size, source + Int64(tile) * size, Int32(size), barrier)
