"""The linear kernel for few tokens: every multiprocessor streams an equal share of the weight.

All of the weight is one line of pieces, one or two packed tiles along K of one tile of rows each, tile after tile,
which is divided evenly among the blocks (`stream_work`). So blocks carry equal loads whatever the shape, and a tile of
rows may be divided among a few neighbouring blocks, which join their sums through `split_k`. A block multiplies what it
has of divided tiles first, so that joining them is over before its last whole tile is.

One warp copies (`stream_copy`). It fills the ring with weights before it waits for the kernel in front, so that they
are on their way while that one ends. The other warps divide the rows of the tile and the pieces of a stage, and
multiply them as types and scales want it (`stream_product`). Warps of the same rows add up through shared memory when a
tile ends, where the result also turns from rows by tokens to tokens by rows.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from b12x_core.kernels import bulk
from b12x_core.kernels.split_k import SplitK
from b12x_core.kernels.stream_copy import X_ROW, StreamRing
from b12x_core.kernels.stream_product import product_for
from b12x_core.kernels.stream_work import divided, segment_of, share_of, sharers_of
from b12x_core.planning.linear import SHARED_MEMORY, TILE_ROWS, WEIGHT_BITS, LinearConfig

_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32, "e4m3": Uint8, "e2m1": Uint8}
_BARRIER, _JOIN_BARRIER = 1, 2  # of the warps that multiply; of those among them that write


class StreamLinear:
    """One configuration of the kernel."""

    def __init__(self, config: LinearConfig):
        self.config = c = config
        self.ring = StreamRing(c)
        self.warps = c.warps_n * c.warps_k
        self.threads = 32 * self.warps
        self.row_groups = c.rows // 16 // c.warps_n  # of a warp
        self.token_groups = c.tokens // 8
        self.block_scales = c.scales == "block"
        self.writers = min(self.threads, c.tokens * c.rows)  # threads that write the output
        self.elements = c.tokens * c.rows // self.writers  # of the output, that such a thread has
        self.split = SplitK(self.elements, self.writers, _JOIN_BARRIER)
        self.pitch = c.rows + 4  # of a token in the table of sums: conflict-free for fragments and for rows
        self.product = product_for(c, self.ring)
        self.tables = c.warps_k if c.tokens < 32 else 1  # of sums, each added to by some of the warps along K in turn
        self.shared_memory = self.ring.bytes + self.tables * c.tokens * self.pitch * 4 + 16 * c.stages + 16
        if (
            (c.rows % TILE_ROWS and c.rows not in (16, 32))
            or c.rows % (16 * c.warps_n)
            or c.tokens % 8
            or c.k_tiles % (self.ring.piece_tiles * c.warps_k)
            or c.warps_t != 1
            or c.warps_k not in (1, 2, 4, 8)
            or self.writers % c.rows
            or (c.tokens * c.rows) % self.writers
        ):
            raise ValueError(f"{c.name}: the warps do not divide the tile evenly")
        if self.block_scales and (c.weight != "e4m3" or 128 % c.rows or 32 % self.ring.pieces):
            raise ValueError(f"{c.name}: block scales go with 8-bit weights and tiles of at most 128 rows")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(f"{c.name}: {self.shared_memory} bytes of shared memory")

    @cute.kernel
    def kernel(
        self,
        copy_x: cute.CopyAtom,
        x_map: cute.Tensor,
        w: cute.Tensor,
        affine: cute.Tensor,
        col_scale: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        counters: cute.Tensor,
        w_scale: cute.Tensor,
        x_scale: cute.Tensor,
        m: Int32,
        n: Int32,
        col_stride: Int32,
        base: Int32,
        extra: Int32,
        per_tile: Int32,
    ):
        """One warp copies, the others multiply."""
        c, ring = self.config, self.ring
        thread, _, _ = cute.arch.thread_idx()
        block, token_tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32

        memory = cutlass.memory.SmemAllocator()
        w_ring = memory.allocate(ring.w_bytes * c.stages, 1024)
        x_ring = memory.allocate(ring.x_bytes * c.stages, 1024)
        scale_ring = w_ring
        if cutlass.const_expr(ring.x_scales):
            scale_ring = memory.allocate(ring.scale_bytes * c.stages, 16)
        sums = memory.allocate_array(Float32, self.tables * c.tokens * self.pitch, byte_alignment=16)
        full = memory.allocate_array(Int64, c.stages, byte_alignment=8)
        empty = memory.allocate_array(Int64, c.stages, byte_alignment=8)
        flags = memory.allocate_array(Int32, 2, byte_alignment=8)

        if thread == 0:
            for s in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, self.warps * (32 if c.checked else 1))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()

        share = share_of(block, base, extra, per_tile)
        segments = divided(share) + share[6]
        if warp == self.warps:
            self.ring.fill(
                copy_x, x_map, w, x_scale, w_ring, x_ring, scale_ring, full, empty, share, segments, per_tile,
                token_tile, lane,
            )  # fmt: skip
        else:
            self.consume(
                w_ring, x_ring, scale_ring, sums, full, empty, flags, affine, col_scale, out, workspace, counters,
                w_scale, m, n, col_stride, share, segments, base, extra, per_tile, block, token_tile, warp, lane,
                thread,
            )  # fmt: skip

    @cute.jit
    def constants(self, index, segments, share, per_tile, affine, w_scale, n, row, group, lane):
        """What does not depend on tokens, of a segment: scale and bias of a row, the weight scales of 32 pieces."""
        c = self.config
        scale, bias, scales = Float32(0), Float32(0), Float32(0)
        if index < segments:
            tile, piece, size = segment_of(index, share, per_tile)
            n_row = tile * c.rows + row
            if n_row < n:
                scale = affine[0, n_row]
                bias = affine[1, n_row]
            if cutlass.const_expr(self.block_scales):
                if lane < size:
                    scales = w_scale[(tile * c.rows + group * 16) // 128, piece + lane]
        return scale, bias, scales

    @cute.jit
    def consume(
        self, w_ring, x_ring, scale_ring, sums, full, empty, flags, affine, col_scale, out, workspace, counters,
        w_scale, m, n, col_stride, share, segments, base, extra, per_tile, block, token_tile, warp, lane, thread,
    ):  # fmt: skip
        """Multiply what arrives in the ring; join and write tiles."""
        c, ring = self.config, self.ring
        warp_n = warp % c.warps_n
        warp_k = warp // c.warps_n
        group = warp_n * self.row_groups
        first_at = self.product.addresses(w_ring, x_ring, scale_ring, group, warp_k, lane)
        row = thread % c.rows
        first_token = thread // c.rows
        writes = warp < self.writers // 32

        acc = cute.make_rmem_tensor((self.row_groups * self.token_groups * 4,), Float32)
        values = cute.make_rmem_tensor((self.elements,), Float32)
        columns = cute.make_rmem_tensor((self.elements,), Float32)
        blocks, _, _ = cute.arch.grid_dim()
        head, _, head_size, tail, tail_size, _, _ = share
        head_owner, head_parts = sharers_of(head, head_size, base, extra, per_tile)
        tail_owner, tail_parts = sharers_of(tail, tail_size, base, extra, per_tile)
        next_scale, next_bias, next_scales = self.constants(
            Int32(0), segments, share, per_tile, affine, w_scale, n, row, group, lane
        )

        cute.arch.griddepcontrol_wait()
        for e in cutlass.range_constexpr(self.elements):
            mine = token_tile * c.tokens + first_token + e * (self.writers // c.rows)
            columns[e] = Float32(0)
            if writes and mine < m:
                columns[e] = col_scale[mine * col_stride]
        # a result of every row group and of every token group depends on all loads of a stage
        loaded = [i * self.token_groups for i in range(self.row_groups)] + list(range(1, self.token_groups))
        guard = col_stride >> 1
        arriving = Int32(0) if c.checked else lane

        stage, phase = Int32(0), Int32(0)
        index = Int32(0)
        while index < segments:
            tile, piece, segment = segment_of(index, share, per_tile)
            scale, bias, later = next_scale, next_bias, next_scales
            next_scale, next_bias, next_scales = self.constants(
                index + 1, segments, share, per_tile, affine, w_scale, n, row, group, lane
            )
            scales = Float32(0)  # of the weight: lane i has that of the i-th piece of 32
            acc.fill(0.0)
            at = Int32(0)
            while at < segment:
                if cutlass.const_expr(self.block_scales):
                    if at % 32 == 0:
                        scales = later
                        if at + 32 + lane < segment:
                            later = w_scale[(tile * c.rows + group * 16) // 128, piece + at + 32 + lane]
                cute.arch.mbarrier_wait(full + stage, phase)
                w_at, s_at, x_at, x_scale_at = first_at
                at_stage = (
                    w_at + stage * ring.w_bytes,
                    s_at + stage * ring.w_bytes,
                    x_at + stage * ring.x_bytes,
                    x_scale_at + stage * ring.scale_bytes,
                )
                for p in cutlass.range_constexpr(ring.pieces // c.warps_k):
                    mine = p * c.warps_k + warp_k
                    if at + mine < segment:
                        factor = Float32(1)
                        if cutlass.const_expr(self.block_scales):
                            factor = cute.arch.shuffle_sync(scales, at % 32 + mine)
                        self.product.multiply(acc, at_stage, p * c.warps_k, factor)
                cute.arch.sync_warp()
                bulk.arrive_after(empty.toint() + stage * 8, arriving, guard, [acc[4 * i] for i in loaded])
                at = at + ring.pieces
                stage = stage + 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
            self.exchange(acc, sums, warp_n, warp_k, lane)
            if writes:
                self.collect(values, sums, row, first_token)
                if segment == per_tile:
                    self.write(values, columns, scale, bias, out, m, n, tile * c.rows + row, token_tile, first_token)
                else:
                    slot = 2 * (token_tile * blocks + block)
                    if piece == 0:
                        slot = slot + 1
                    self.split.store(values, workspace, slot, thread)
            index = index + 1
            if writes and index == divided(share):
                self.join(
                    values, columns, affine, workspace, counters, flags, out, m, n, head, head_owner, head_parts, tail,
                    tail_owner, tail_parts, blocks, token_tile, row, first_token, thread,
                )  # fmt: skip

    @cute.jit
    def write(self, values, columns, scale, bias, out, m, n, n_row, token_tile, first_token):
        """Scale, convert and write the sums of a tile."""
        c = self.config
        for e in cutlass.range_constexpr(self.elements):
            mine = token_tile * c.tokens + first_token + e * (self.writers // c.rows)
            if mine < m and n_row < n:
                out[Int64(mine), n_row] = _TYPES[c.out](values[e] * scale * columns[e] + bias)

    @cute.jit
    def join(
        self, values, columns, affine, workspace, counters, flags, out, m, n, head, head_owner, head_parts, tail,
        tail_owner, tail_parts, blocks, token_tile, row, first_token, thread,
    ):  # fmt: skip
        """Count in the parts that this block stored, and write the tiles that are complete with them.

        A block has at most two parts: the end of a tile, in its slot 0, and the beginning of one, in its slot 1.
        """
        c = self.config
        origin = token_tile * blocks
        counter = counters.iterator.toint()
        self.split.arrive(
            [
                (counter + Int64(origin + head_owner) * 4, head_parts),
                (counter + Int64(origin + tail_owner) * 4, tail_parts),
            ],
            flags,
            thread,
        )
        tile, owner, parts = head, head_owner, head_parts
        for i in cutlass.range(2, unroll=1):
            if flags[i] != 0:
                n_row = tile * c.rows + row
                scale, bias = Float32(0), Float32(0)
                if n_row < n:
                    scale = affine[0, n_row]
                    bias = affine[1, n_row]
                first = 2 * (origin + owner)
                self.split.gather(values, workspace, first + 1, first, Int32(2), parts, thread)
                self.write(values, columns, scale, bias, out, m, n, n_row, token_tile, first_token)
            tile, owner, parts = tail, tail_owner, tail_parts

    def table(self, sums):
        """The sums of warps in shared memory: (table, token, row)."""
        c = self.config
        return cute.make_tensor(
            sums, cute.make_layout((self.tables, c.tokens, c.rows), stride=(c.tokens * self.pitch, self.pitch, 1))
        )

    @cute.jit
    def exchange(self, acc, sums, warp_n, warp_k, lane):
        """Put the sums of all warps into shared memory."""
        table = self.table(sums)
        for turn in cutlass.range_constexpr(self.config.warps_k // self.tables):
            # the last tile's have been read, or those of the turn before are there
            cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=self.threads)
            if warp_k // self.tables == turn:
                for i in cutlass.range_constexpr(self.row_groups):
                    for j in cutlass.range_constexpr(self.token_groups):
                        for r in cutlass.range_constexpr(4):
                            token = j * 8 + (lane % 4) * 2 + r % 2
                            row = (warp_n * self.row_groups + i) * 16 + lane // 4 + (r // 2) * 8
                            total = acc[(i * self.token_groups + j) * 4 + r]
                            if cutlass.const_expr(turn > 0):
                                total = total + table[warp_k % self.tables, token, row]
                            table[warp_k % self.tables, token, row] = total
        cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=self.threads)

    @cute.jit
    def collect(self, values, sums, row, first_token):
        """Add the sums of the warps along K; a thread gets tokens `first_token`, ... of one row."""
        table = self.table(sums)
        for e in cutlass.range_constexpr(self.elements):
            token = first_token + e * (self.writers // self.config.rows)
            total = table[0, token, row]
            for k in cutlass.range_constexpr(1, self.tables):
                total = total + table[k, token, row]
            values[e] = total

    @cute.jit
    def launch(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        affine: cute.Tensor,
        col_scale: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        counters: cute.Tensor,
        w_scale: cute.Tensor,
        x_scale: cute.Tensor,
        m: Int32,
        n: Int32,
        k: Int32,
        col_stride: Int32,
        ctas: Int32,
        stream,
    ):
        """Divide the work and start `ctas` blocks for every tile of tokens.

        Args:
            x: (M, K), row stride a multiple of 16 bytes; e4m3 as Uint8, e2m1 as Uint8 (M, K / 2).
            w: (ceil(N / 64), packed tiles along K, `tile_bytes`) Uint8.
            affine: fp32 (2, padded N), scale and bias of every row.
            col_scale: fp32, of token i at i * `col_stride`, which is 0 or 1.
            out: (M, N).
            workspace: fp32, 2 * `ctas` * ceil(M / tokens) * rows * tokens numbers, whatever they are.
            counters: Int32, `ctas` * ceil(M / tokens) zeros, which they are again afterwards.
            w_scale: fp32 (ceil(N / 128), ceil(K / 128)).
            x_scale: fp32 (ceil(K / 128), at least M), row stride a multiple of 16 bytes; or, for an instruction
                that takes scales, Uint8 (packed tiles along K, M rounded up to 8, scales of a token in a packed tile).
        """
        c = self.config
        bits = WEIGHT_BITS[c.activation]
        width = max(bits // 8, 1)  # bytes of an element of the tensor
        x_bytes = cute.make_tensor(
            cute.recast_ptr(x.iterator, dtype=Uint8),
            cute.make_layout((m, (k * bits + 7) // 8), stride=(cute.assume(Int64(x.stride[0]) * width, divby=16), 1)),
        )
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout((c.tokens, X_ROW), stride=(X_ROW, 1))
        )
        copy_x, x_map = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x_bytes, layout, (c.tokens, X_ROW)
        )
        per_tile = (Int32(w.shape[1]) + self.ring.piece_tiles - 1) // self.ring.piece_tiles
        total = (n + c.rows - 1) // c.rows * per_tile
        base = total // ctas
        self.kernel(
            copy_x, x_map, w, affine, col_scale, out, workspace, counters, w_scale, x_scale, m, n, col_stride, base,
            total - base * ctas, per_tile,
        ).launch(
            grid=(ctas, (m + c.tokens - 1) // c.tokens, 1),
            block=(self.threads + 32, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    @cute.jit
    def launch_plain(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        affine: cute.Tensor,
        col_scale: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        counters: cute.Tensor,
        m: Int32,
        n: Int32,
        k: Int32,
        col_stride: Int32,
        ctas: Int32,
        stream,
    ):
        """`launch` where no scales of blocks are."""
        self.launch(
            x, w, affine, col_scale, out, workspace, counters, affine, affine, m, n, k, col_stride, ctas, stream
        )

    @cute.jit
    def launch_w_scale(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        affine: cute.Tensor,
        col_scale: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        counters: cute.Tensor,
        w_scale: cute.Tensor,
        m: Int32,
        n: Int32,
        k: Int32,
        col_stride: Int32,
        ctas: Int32,
        stream,
    ):
        """`launch` where only the weight has scales of blocks."""
        self.launch(
            x, w, affine, col_scale, out, workspace, counters, w_scale, affine, m, n, k, col_stride, ctas, stream
        )

    @cute.jit
    def launch_x_scale(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        affine: cute.Tensor,
        col_scale: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        counters: cute.Tensor,
        x_scale: cute.Tensor,
        m: Int32,
        n: Int32,
        k: Int32,
        col_stride: Int32,
        ctas: Int32,
        stream,
    ):
        """`launch` where the weight has its scales of blocks in its packed tiles, and tokens have some."""
        self.launch(
            x, w, affine, col_scale, out, workspace, counters, affine, x_scale, m, n, k, col_stride, ctas, stream
        )


def compile(config: LinearConfig, options: str = ""):
    """Compile for the target of CUTE_DSL_ARCH; `options` go to `cute.compile` besides its own."""
    size, wide = cute.sym_int, cute.sym_int64
    matrix = lambda kind, divisor=1, **k: make_fake_tensor(  # noqa: E731
        kind, (size(), size()), (wide(divisibility=divisor), 1), **k
    )
    vector = lambda kind: make_fake_tensor(kind, (size(),), (1,), assumed_align=4)  # noqa: E731
    tensors = [
        matrix(_TYPES[config.activation], min(128 // WEIGHT_BITS[config.activation], 16), assumed_align=16),
        make_fake_tensor(Uint8, (size(), size(), config.tile_bytes), (wide(), config.tile_bytes, 1), assumed_align=16),
        matrix(Float32),
        vector(Float32),
        matrix(_TYPES[config.out]),
        vector(Float32),
        vector(Int32),
    ]
    kernel = StreamLinear(config)
    entry = kernel.launch_plain
    if kernel.block_scales:
        tensors.append(matrix(Float32))
        entry = kernel.launch_w_scale
    if kernel.ring.native:
        unit = kernel.ring.scale_unit
        scales = make_fake_tensor(Uint8, (size(), size(), unit), (wide(divisibility=16), unit, 1), assumed_align=16)
        tensors.append(scales)
        entry = kernel.launch_x_scale
    elif kernel.ring.x_scales:
        tensors.append(matrix(Float32, 4, assumed_align=16))
        entry = kernel.launch
    return cute.compile(
        entry,
        *tensors,
        *[Int32(1)] * 5,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
