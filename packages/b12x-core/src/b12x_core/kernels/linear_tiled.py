"""The linear kernel for many tokens: tiles of the output, both operands through shared memory.

A block of threads owns one tile of weight rows by tokens at a time. One warp keeps a ring of stages full: packed weight
tiles arrive by bulk copies (they are stored as the fragments that the matrix instruction reads), tokens by a tensor
map, swizzled for `ldmatrix`. The other warps multiply; each loads the fragments of the next 32 bytes of K while it
multiplies the present ones, across stages too.

The grid is persistent: every block takes whole tiles while there are enough for all, and the tiles that are left are
divided among all blocks along K. Blocks that share a tile write partial sums; the last one to arrive adds them in a
fixed order, so the result does not depend on timing.
"""

from __future__ import annotations

import os

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from b12x_core.kernels import bulk, mma, tile_work
from b12x_core.kernels.epilogue import OUT_TYPES, Epilogue
from b12x_core.kernels.partial_sums import PartialSums
from b12x_core.kernels.scales import BLOCK, BlockScales, zeros
from b12x_core.planning.linear import ELEMENT_BYTES, K_TILE_BYTES, SHARED_MEMORY, TILE_ROWS, LinearConfig

_X_TYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Uint8}
_TILE_BYTES = TILE_ROWS * K_TILE_BYTES


class TiledLinear:
    """One configuration of the kernel."""

    def __init__(self, config: LinearConfig):
        self.config = config
        c = config
        self.block_scaled = c.scales == "block"
        self.token_scaled = self.block_scaled and c.activation == "e4m3"
        self.steps = c.k_tiles * K_TILE_BYTES // 32  # of 32 bytes of weight, in a stage
        x_bytes = ELEMENT_BYTES[c.activation]
        self.x_element_bytes = x_bytes
        self.step_bytes = 32 * x_bytes // ELEMENT_BYTES[c.weight]  # of a token, in a step
        self.row_bytes = self.step_bytes * self.steps  # of a token, in a stage
        self.warps = c.warps_n * c.warps_t
        self.row_groups = c.rows // c.warps_n // 16
        self.token_groups = c.tokens // c.warps_t // 8
        self.w_bytes = c.rows * K_TILE_BYTES * c.k_tiles
        self.stage_bytes = self.w_bytes + c.tokens * self.row_bytes
        # The registers of a multiprocessor lie in four parts. Up to 4 warps beside the loading one leave the most that
        # a thread can have; of 8 warps and the loading one, three share a part, so groups of 4 warps trade registers.
        self.trades = self.warps == 8
        self.threads = 32 * (self.warps + (4 if self.trades else 1))
        # Hopper has no such instruction for e4m3: ptxas would make two of fp16 and four additions of each, which is
        # slower than two of fp16 on operands that are converted here
        self.narrow_tokens = c.activation == "e4m3" and os.environ["CUTE_DSL_ARCH"].startswith("sm_90")
        multiplied = "fp16" if self.narrow_tokens else c.activation
        self.shared_bytes = c.stages * (self.stage_bytes + 16 + (4 * c.tokens if self.token_scaled else 0)) + 32
        # two blocks on a multiprocessor where both fit into what the smallest target has, 1 KiB each for the system
        self.blocks_per_mp = 2 if not self.trades and 2 * (self.shared_bytes + 1024) <= 102400 else 1
        self.instruction = mma.BY_ACTIVATION[multiplied]
        self.decode = mma.DECODE.get((c.weight, multiplied))
        self.parts = 2 if self.decode is not None else 1  # instructions along K in a step
        self.stage_k = c.k_tile * c.k_tiles
        self.scales = BlockScales(self.row_groups, self.token_groups, self.token_scaled)
        self.sums = PartialSums(self.row_groups * self.token_groups, self.warps, barrier_id=1)
        self.epilogue = Epilogue(c.out, self.row_groups, self.token_groups)
        if self.shared_bytes > SHARED_MEMORY:
            raise ValueError(f"{c.name}: {self.shared_bytes} bytes of shared memory, more than {SHARED_MEMORY}")
        if self.row_bytes not in (64, 128):
            raise ValueError(f"{c.name}: a stage has {self.row_bytes} bytes of each token, not 64 or 128")
        if (
            self.row_groups not in (1, 2, 3, 4)
            or (self.row_groups == 3 and c.k_tiles > 1)
            or self.token_groups % 2
            or c.rows % TILE_ROWS
            or c.warps_k != 1
        ):
            raise ValueError(f"{c.name}: warps do not divide the tile into parts that can be loaded")

    @cute.kernel
    def kernel(
        self,
        copy_x: cute.CopyAtom,
        tokens_map: cute.Tensor,
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
    ):
        """One warp keeps the ring full, the others multiply."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32

        memory = cutlass.memory.SmemAllocator()
        ring = memory.allocate(self.stage_bytes * c.stages, 1024)
        full = memory.allocate_array(Int64, c.stages, byte_alignment=8)
        empty = memory.allocate_array(Int64, c.stages, byte_alignment=8)
        flag = memory.allocate_array(Int32, 1, byte_alignment=4)
        x_scales = memory.allocate_array(Float32, c.tokens * c.stages if self.token_scaled else 4, byte_alignment=16)

        if thread == 0:
            for s in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, self.warps * (32 if c.checked else 1))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()

        stages_k = (Int32(w.shape[1]) + c.k_tiles - 1) // c.k_tiles
        row_tiles = (n + c.rows - 1) // c.rows
        token_tiles = (m + c.tokens - 1) // c.tokens
        share = tile_work.share(row_tiles, token_tiles, stages_k, c.k_tiles, block, blocks)

        if warp >= self.warps:
            if cutlass.const_expr(self.trades):
                cute.arch.setmaxregister_decrease(24)
            if warp == self.warps:
                self.produce(copy_x, tokens_map, w, x_scale, ring, x_scales, full, empty, share, lane)
        else:
            if cutlass.const_expr(self.trades):
                cute.arch.setmaxregister_increase(240)
            cute.arch.griddepcontrol_wait()
            self.consume(
                ring, x_scales, full, empty, flag, affine, col_scale, out, workspace, counters, w_scale, m, n,
                col_stride, share, warp, lane, thread,
            )  # fmt: skip

    @cute.jit
    def produce(
        self, copy_x, tokens_map, w, x_scale, ring, x_scales, full, empty, share: cutlass.Constexpr, lane
    ):  # fmt: skip
        """Keep the ring full. The weight depends on no earlier kernel: the first stages get it before those end."""
        c = self.config
        swizzle = cute.make_swizzle(3 if self.row_bytes == 128 else 2, 4, 3)
        layout = cute.make_layout((c.tokens, self.row_bytes, c.stages), stride=(self.row_bytes, 1, self.stage_bytes))
        shared = cute.make_tensor(cute.recast_ptr(ring + self.w_bytes, swizzle, dtype=Uint8), layout)
        tiled = cute.local_tile(tokens_map, (c.tokens, self.row_bytes), (None, None))
        x_shared, x_global = cpasync.tma_partition(
            copy_x, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiled, 0, 2)
        )
        stage, phase, done = Int32(0), Int32(1), Int32(0)
        ahead = Int32(0)  # stages whose weight is under way
        if share.work > 0:
            index, k, count, _ = tile_work.piece(share, done)
            row_tile, token_tile = tile_work.tile(share, index)
            ahead = cutlass.min(count, c.stages)
            if lane == 0:
                for s in cutlass.range(ahead, unroll=1):
                    self.copy_weights(w, ring, full, row_tile, token_tile, k + s, s, x_scale)
        cute.arch.griddepcontrol_wait()
        while done < share.work:
            index, k, count, taken = tile_work.piece(share, done)
            row_tile, token_tile = tile_work.tile(share, index)
            done = done + taken
            for i in cutlass.range(count, unroll=1):
                if ahead > 0:
                    ahead = ahead - 1
                else:
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    if lane == 0:
                        self.copy_weights(w, ring, full, row_tile, token_tile, k + i, stage, x_scale)
                if cutlass.const_expr(self.token_scaled):
                    if lane == 0:
                        self.copy_scales(x_scale, x_scales, full, token_tile, k + i, stage)
                cute.copy(copy_x, x_global[None, token_tile, k + i], x_shared[None, stage], tma_bar_ptr=full + stage)
                stage = stage + 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase = phase ^ 1

    @cute.jit
    def scale_bytes(self, x_scale, token_tile):
        """Bytes of token scales of a stage: the rows of `x_scale` end earlier than the last tile."""
        c = self.config
        return cutlass.min(Int32(x_scale.stride[0]) - token_tile * c.tokens, c.tokens) * 4

    @cute.jit
    def copy_scales(self, x_scale, x_scales, full, token_tile, k, stage):
        """Start the copy of the token scales of a stage."""
        c = self.config
        at = Int64((k * self.stage_k) // BLOCK) * Int64(x_scale.stride[0]) + Int64(token_tile * c.tokens)
        bulk.bulk_copy(
            x_scales.toint() + stage * (c.tokens * 4),
            x_scale.iterator.toint() + at * 4,
            self.scale_bytes(x_scale, token_tile),
            full.toint() + stage * 8,
        )

    @cute.jit
    def copy_weights(self, w, ring, full, row_tile, token_tile, k, stage, x_scale):
        """Say how many bytes a stage gets in all, and start the copies of its weight."""
        c = self.config
        groups = c.rows // TILE_ROWS
        k_tiles = Int32(w.shape[1])
        first = row_tile * groups
        present = cutlass.min(Int32(w.shape[0]) - first, groups)
        size = present * (_TILE_BYTES * c.k_tiles) + c.tokens * self.row_bytes
        if cutlass.const_expr(self.token_scaled):
            size = size + self.scale_bytes(x_scale, token_tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
        at = ring.toint() + stage * self.stage_bytes
        source = w.iterator.toint() + (Int64(first) * Int64(k_tiles) + Int64(k * c.k_tiles)) * _TILE_BYTES
        for r in cutlass.range_constexpr(groups):
            if r < present:
                self.copy_weight(
                    at + r * (_TILE_BYTES * c.k_tiles),
                    source + Int64(k_tiles) * (_TILE_BYTES * r),
                    full.toint() + stage * 8,
                    k_tiles - k * c.k_tiles,
                )

    @cute.jit
    def copy_weight(self, at, source, barrier, left):
        """Copy the packed tiles of a stage and 64 rows, of which `left` exist along K.

        In place of those beyond the end the last one comes again: tokens are zero there, and any weight does.
        """
        count = self.config.k_tiles
        if cutlass.const_expr(count == 1):
            bulk.bulk_copy(at, source, Int32(_TILE_BYTES), barrier)
        elif left >= count:
            bulk.bulk_copy(at, source, Int32(_TILE_BYTES * count), barrier)
        else:
            for i in cutlass.range_constexpr(count):
                tile = cutlass.min(Int32(i), left - 1)
                bulk.bulk_copy(at + i * _TILE_BYTES, source + Int64(tile) * _TILE_BYTES, Int32(_TILE_BYTES), barrier)

    @cute.jit
    def load_weight(self, a, group, w_at, step):
        """The fragment of 16 rows and a step into a [row group][4]."""
        words = bulk.load_shared(w_at, group * 1024 + (step // 2) * _TILE_BYTES + (step % 2) * 512)
        for r in cutlass.range_constexpr(4):
            a[group, r] = words[r]

    @cute.jit
    def load_tokens(self, b, half, x_at, step):
        """The fragments of 32 bytes of every token, the `step`th of the stage, into b [half][token pair][4]."""
        at = x_at ^ (step * 32)
        for j in cutlass.range_constexpr(self.token_groups // 2):
            words = bulk.load_matrices(at, j * 16 * self.row_bytes)
            for r in cutlass.range_constexpr(4):
                b[half, j, r] = words[r]

    @cute.jit
    def load_all(self, a, b, w_at, x_at):
        """The fragments that a stage begins with."""
        for i in cutlass.range_constexpr(self.row_groups):
            self.load_weight(a, i, w_at, 0)
        self.load_tokens(b, 0, x_at, 0)

    @cute.jit
    def multiply(self, acc, a, b, step, fresh, w_next, x_at, x_next):
        """Add 32 bytes of the weight times tokens to acc, or set it where `fresh`; load the next fragments meanwhile.

        Fragments of the weight are replaced as soon as they were used; those of tokens have two buffers.
        """
        count = self.step_bytes // 32
        for q in cutlass.range_constexpr(count):
            sub = step * count + q  # of 32 bytes of a token, in the stage
            following = (sub + 1) % (self.steps * count)
            half = sub % 2
            self.load_tokens(b, 1 - half, x_next if q == count - 1 else x_at, following)
            for instruction in cutlass.range_constexpr(2 if self.narrow_tokens else 1):
                part = max(q, instruction)
                tokens = self.token_operands(b, half, part)
                for i in cutlass.range_constexpr(self.row_groups):
                    operand = self.weight_operand(a, i, part)
                    for j in cutlass.range_constexpr(self.token_groups):
                        at = (i * self.token_groups + j) * 4
                        before = zeros() if fresh and part == 0 else [acc[at + r] for r in range(4)]
                        result = self.instruction(operand, tokens[j], before)
                        for r in cutlass.range_constexpr(4):
                            acc[at + r] = result[r]
                    if cutlass.const_expr(part == self.parts - 1):
                        self.load_weight(a, i, w_next, (step + 1) % self.steps)

    def token_operands(self, b, half, part):
        """The B operands of all groups of 8 tokens."""
        words = [(b[half, j // 2, 2 * (j % 2)], b[half, j // 2, 2 * (j % 2) + 1]) for j in range(self.token_groups)]
        return [self.decode(w[part]) for w in words] if self.narrow_tokens else words

    def weight_operand(self, a, group, part):
        """The A operand of 16 rows."""
        words = [a[group, r] for r in range(4)]
        if self.decode is None:
            return words
        top, bottom = self.decode(words[2 * part]), self.decode(words[2 * part + 1])
        return [top[0], bottom[0], top[1], bottom[1]]

    @cute.jit
    def consume(
        self, ring, x_scales, full, empty, flag, affine, col_scale, out, workspace, counters, w_scale, m, n,
        col_stride, share: cutlass.Constexpr, warp, lane, thread,
    ):  # fmt: skip
        """Multiply what arrives in the ring, and write tiles."""
        c = self.config
        warp_n = warp % c.warps_n
        warp_t = warp // c.warps_n
        group = warp_n * self.row_groups
        w_at = ring.toint() + (group // 4) * (c.k_tiles * _TILE_BYTES) + (group % 4) * 1024 + lane * 16
        # ldmatrix: lanes 0-7 and 8-15 give the first and second 16 bytes of tokens 0-7, lanes 16-31 of tokens 8-15
        token_row = warp_t * (self.token_groups * 8) + (lane // 16) * 8 + lane % 8
        chunk = (lane // 8) % 2
        if cutlass.const_expr(self.row_bytes == 128):
            chunk = chunk ^ (token_row % 8)
        else:
            chunk = chunk ^ ((token_row // 2) % 4)
        x_at = ring.toint() + self.w_bytes + token_row * self.row_bytes + chunk * 16
        empty_at = empty.toint()
        elected = Int32(0)
        if lane == 0 or c.checked:
            elected = Int32(1)

        acc = cute.make_rmem_tensor((self.row_groups * self.token_groups * 4,), Float32)
        a = cute.make_rmem_tensor((self.row_groups, 4), Uint32)
        b = cute.make_rmem_tensor((2, self.token_groups // 2, 4), Uint32)
        part = acc
        if cutlass.const_expr(self.block_scaled):
            part = cute.make_rmem_tensor((self.row_groups * self.token_groups * 4,), Float32)
        # of tokens 2 t and 2 t + 1 of this warp
        scales_at = x_scales.toint() + (warp_t * (self.token_groups * 8) + 2 * (lane % 4)) * 4

        stage, phase, offset, done = Int32(0), Int32(0), Int32(0), Int32(0)
        while done < share.work:
            index, k, count, taken = tile_work.piece(share, done)
            row_tile, token_tile = tile_work.tile(share, index)
            done = done + taken
            row = row_tile * c.rows + warp_n * (self.row_groups * 16)
            acc.fill(0.0)
            if cutlass.const_expr(self.block_scaled):
                weight_scale = self.scales.weight_scale(w_scale, row, k * self.stage_k)
            cute.arch.mbarrier_wait(full + stage, phase)
            self.load_all(a, b, w_at + offset, x_at + offset)
            used, leaving = empty_at, Int32(0)
            for i in cutlass.range(count, unroll=1):
                after, after_phase, after_offset = stage + 1, phase, offset + self.stage_bytes
                if after == c.stages:
                    after, after_phase, after_offset = Int32(0), phase ^ 1, Int32(0)
                for step in cutlass.range_constexpr(self.steps - 1):
                    self.multiply(
                        part, a, b, step, self.block_scaled and step == 0, w_at + offset, x_at + offset, x_at + offset
                    )
                if cutlass.const_expr(self.block_scaled):
                    factors = self.scales.factors(weight_scale, scales_at + stage * (c.tokens * 4))
                    weight_scale = self.scales.weight_scale(w_scale, row, (k + i + 1) * self.stage_k)
                # Give back the stage before. An arrival can overtake loads from shared memory that the warp issued
                # earlier; all that read that stage were waited for by instructions of the last iteration. Loads in turn
                # are not moved ahead of an arrival, so it stands behind those of this stage.
                cute.arch.sync_warp()
                bulk.arrive(used, leaving)
                ahead = offset  # behind the last stage this one is loaded again, and nobody uses it
                if i + 1 < count:
                    cute.arch.mbarrier_wait(full + after, after_phase)
                    ahead = after_offset
                self.multiply(part, a, b, self.steps - 1, False, w_at + ahead, x_at + offset, x_at + ahead)
                if cutlass.const_expr(self.block_scaled):
                    self.scales.add(acc, part, factors)
                used, leaving = empty_at + stage * 8, elected
                stage, phase, offset = after, after_phase, after_offset
            cute.arch.sync_warp()
            bulk.arrive(used, leaving)

            complete = Boolean(True)
            if count < share.stages:
                complete = self.sums.join(
                    acc, workspace, counters, flag, share, index - share.whole, warp, lane, thread
                )
            if complete:
                self.epilogue(
                    acc, affine, col_scale, col_stride, out, m, n, row,
                    token_tile * c.tokens + warp_t * (self.token_groups * 8), lane,
                )  # fmt: skip

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
        m: Int32,
        n: Int32,
        k: Int32,
        col_stride: Int32,
        ctas: Int32,
        stream,
    ):
        """Scales at the end."""
        self.start(
            x, w, affine, col_scale, out, workspace, counters, affine, affine, m, n, k, col_stride, ctas, stream
        )  # fmt: skip

    @cute.jit
    def launch_block(
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
        """Scales of blocks of weight and tokens."""
        self.start(
            x, w, affine, col_scale, out, workspace, counters, w_scale, x_scale, m, n, k, col_stride, ctas, stream
        )  # fmt: skip

    @cute.jit
    def launch_weight_block(
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
        """Scales of blocks of weight."""
        self.start(
            x, w, affine, col_scale, out, workspace, counters, w_scale, w_scale, m, n, k, col_stride, ctas, stream
        )  # fmt: skip

    @cute.jit
    def start(
        self, x, w, affine, col_scale, out, workspace, counters, w_scale, x_scale, m, n, k, col_stride, ctas, stream
    ):
        """Make the tensor map of the tokens and launch."""
        c = self.config
        width = self.x_element_bytes
        as_bytes = cute.make_tensor(
            cute.recast_ptr(x.iterator, dtype=Uint8),
            cute.make_layout((m, k * width), stride=(cute.assume(Int64(x.stride[0]) * width, divby=16), 1)),
        )
        layout = cute.make_composed_layout(
            cute.make_swizzle(3 if self.row_bytes == 128 else 2, 4, 3),
            0,
            cute.make_layout((c.tokens, self.row_bytes), stride=(self.row_bytes, 1)),
        )
        copy_x, tokens_map = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), as_bytes, layout, (c.tokens, self.row_bytes)
        )
        self.kernel(
            copy_x, tokens_map, w, affine, col_scale, out, workspace, counters, w_scale, x_scale, m, n, col_stride
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks_per_mp,
            preferred_smem_carveout=100 if self.blocks_per_mp > 1 else None,
            use_pdl=True,
        )


def compile(config: LinearConfig, options: str = ""):
    """Compile for the target of CUTE_DSL_ARCH; `options` go to `cute.compile` besides its own."""
    size, wide = cute.sym_int, cute.sym_int64
    vector = lambda kind: make_fake_tensor(kind, (size(),), (1,), assumed_align=16)  # noqa: E731
    x_align = 16 // ELEMENT_BYTES[config.activation]
    matrices = (
        make_fake_tensor(
            _X_TYPES[config.activation], (size(), size()), (wide(divisibility=x_align), 1), assumed_align=16
        ),
        make_fake_tensor(Uint8, (size(), size(), _TILE_BYTES), (wide(), _TILE_BYTES, 1), assumed_align=16),
        make_fake_tensor(Float32, (2, size()), (wide(), 1), assumed_align=16),
        vector(Float32),
        make_fake_tensor(OUT_TYPES[config.out], (size(), size()), (wide(), 1)),
        vector(Float32),
        vector(Int32),
    )
    kernel = TiledLinear(config)
    entry, scales = kernel.launch, ()
    if kernel.block_scaled:
        matrix = make_fake_tensor(Float32, (size(), size()), (wide(), 1))
        entry, scales = kernel.launch_weight_block, (matrix,)
        if kernel.token_scaled:
            by_token = make_fake_tensor(Float32, (size(), size()), (wide(divisibility=4), 1), assumed_align=16)
            entry, scales = kernel.launch_block, (matrix, by_token)
    ints = [Int32(1)] * 5
    return cute.compile(
        entry,
        *matrices,
        *scales,
        *ints,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
