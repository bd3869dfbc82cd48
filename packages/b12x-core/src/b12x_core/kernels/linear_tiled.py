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
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from b12x_core.kernels import bulk, decode, mma, tile_work, weight_operands
from b12x_core.kernels.block_mma import BLOCK_MMA, BlockOperands
from b12x_core.kernels.epilogue import OUT_TYPES, Epilogue
from b12x_core.kernels.partial_sums import PartialSums
from b12x_core.kernels.scales import BlockScales, zeros
from b12x_core.kernels.tiled_copy import TiledRing
from b12x_core.kernels.token_operands import ChunkTokens, MatrixTokens
from b12x_core.planning.linear import K_TILE_BYTES, SHARED_MEMORY, TILE_ROWS, WEIGHT_BITS, LinearConfig

_X_TYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Uint8, "e2m1": Uint8}
_CODE_BYTES = TILE_ROWS * K_TILE_BYTES  # of a packed tile, before its scales


class TiledLinear:
    """One configuration of the kernel."""

    def __init__(self, config: LinearConfig):
        self.config = c = config
        self.ring = TiledRing(c)
        self.block_scaled = c.scales == "block"
        self.warps = c.warps_n * c.warps_t
        self.row_groups = c.rows // c.warps_n // 16
        self.token_groups = c.tokens // c.warps_t // 8
        self.steps = 2 * c.k_tiles  # of 32 bytes of weight, in a turn
        # The registers of a multiprocessor lie in four parts. Up to 4 warps beside the loading one leave the most that
        # a thread can have; of 8 warps and the loading one, three share a part, so groups of 4 warps trade registers.
        self.trades = self.warps == 8
        self.threads = 32 * (self.warps + (4 if self.trades else 1))
        self.shared_bytes = self.ring.bytes + 32
        # two blocks on a multiprocessor where both fit into what the smallest target has, 1 KiB each for the system
        self.blocks_per_mp = 2 if not self.trades and 2 * (self.shared_bytes + 1024) <= 102400 else 1
        # Hopper has no such instruction for e4m3: ptxas would make two of fp16 and four additions of each, which is
        # slower than two of fp16 on operands that are converted here
        hopper = os.environ["CUTE_DSL_ARCH"].startswith("sm_90")
        self.narrow_tokens = c.activation == "e4m3" and not self.ring.native and hopper
        self.instruction = mma.BY_ACTIVATION.get("fp16" if self.narrow_tokens else c.activation)
        if self.ring.native:
            self.instruction = BLOCK_MMA[c.weight, c.activation, c.scales]
            self.weights = BlockOperands(c.weight, c.activation, c.scales)
        elif c.scales in ("nv16", "mx32"):
            self.weights = weight_operands.Scaled(c.weight, c.activation, c.scales)
        elif self.narrow_tokens:
            self.weights = weight_operands.Widened("fp16", parts=1, instructions=2)
        elif c.weight != c.activation:
            self.weights = weight_operands.Widened(c.activation, parts=2, instructions=1)
        else:
            self.weights = weight_operands.Stored()
        kind = ChunkTokens if c.weight == "e2m1" and not self.ring.native else MatrixTokens
        self.tokens = kind(self.token_groups, self.ring.row_bytes)
        self.turn_k = c.k_tile * c.k_tiles
        self.stage_steps = self.steps // self.ring.parts
        self.subs = self.stage_steps * self.weights.parts  # parts of steps in a stage
        self.scales = BlockScales(self.row_groups, self.token_groups, self.ring.by_block)
        self.sums = PartialSums(self.row_groups * self.token_groups, self.warps, barrier_id=1)
        self.epilogue = Epilogue(c.out, self.row_groups, self.token_groups)
        if self.shared_bytes > SHARED_MEMORY:
            raise ValueError(f"{c.name}: {self.shared_bytes} bytes of shared memory, more than {SHARED_MEMORY}")
        if (
            self.row_groups not in (1, 2, 3, 4)
            or (self.row_groups == 3 and self.ring.tile_bytes * c.k_tiles != _CODE_BYTES)
            or self.token_groups % 2
            or c.rows % TILE_ROWS
            or c.warps_k != 1
            or self.subs * self.tokens.part_bytes != self.ring.row_bytes
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
        x_ring = memory.allocate(self.ring.x_bytes * c.stages, 1024)
        w_ring = memory.allocate(self.ring.w_bytes * self.ring.w_slots, 128)
        full = memory.allocate_array(Int64, c.stages, byte_alignment=8)
        empty = memory.allocate_array(Int64, c.stages, byte_alignment=8)
        flag = memory.allocate_array(Int32, 1, byte_alignment=4)
        scale_ring = w_ring
        if cutlass.const_expr(self.ring.scale_bytes > 0):
            scale_ring = memory.allocate(self.ring.scale_bytes * c.stages, 16)

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
        share = tile_work.share(row_tiles, token_tiles, stages_k, self.ring.cost, block, blocks)

        if warp >= self.warps:
            if cutlass.const_expr(self.trades):
                cute.arch.setmaxregister_decrease(24)
            if warp == self.warps:
                self.ring.fill(
                    copy_x, tokens_map, w, x_scale, w_ring, x_ring, scale_ring, full, empty, share, lane
                )  # fmt: skip
        else:
            if cutlass.const_expr(self.trades):
                cute.arch.setmaxregister_increase(240)
            cute.arch.griddepcontrol_wait()
            self.consume(
                w_ring, x_ring, scale_ring, full, empty, flag, affine, col_scale, out, workspace,
                counters, w_scale, m, n, col_stride, share, warp, lane, thread,
            )  # fmt: skip

    @cute.jit
    def load_weight(self, a, scale, group, at, scales_at, step: cutlass.Constexpr):
        """The fragment of 16 rows and a step into a [row group][4], and their scales, where others begin."""
        tile = (step // 2) * self.ring.tile_bytes
        words = bulk.load_shared(at, group * 1024 + tile + (step % 2) * 512)
        for r in cutlass.range_constexpr(4):
            a[group, r] = words[r]
        if cutlass.const_expr(self.weights.scale_bytes > 0):
            self.weights.load_scales(scale, group, self.row_groups, scales_at + tile, step)

    @cute.jit
    def load_token_scales(self, x_scale, group: cutlass.Constexpr, at, step: cutlass.Constexpr):
        """After a group of 8 tokens was used: the scales that the instruction takes from `step` on."""
        if cutlass.const_expr(self.ring.native):
            tile = (step // 2) % self.config.k_tiles * (self.config.tokens * self.weights.unit)
            self.weights.load_token_scales(x_scale, group, self.token_groups, at + tile, step)

    @cute.jit
    def multiply(
        self, acc, a, scale, b, x_scale, sub: cutlass.Constexpr, step: cutlass.Constexpr, fresh: cutlass.Constexpr,
        w_next, scales_next, x_next, x_scales_next,
    ):  # fmt: skip
        """Add a part of a step of the weight times tokens to acc, or set it where `fresh`; load the next meanwhile.

        Args:
            sub: number of the part in the stage.
            step: number of the step in the turn.
            w_next, scales_next, x_next, x_scales_next: where the next step of the weight and the next part of the
                tokens are, and the scales of both.
        """
        part, following = sub % self.weights.parts, (sub + 1) % self.subs
        final_part = part == self.weights.parts - 1
        self.tokens.load_ahead(b, following, x_next)
        for instruction in cutlass.range_constexpr(self.weights.instructions):
            tokens = self.token_operands(b, x_scale, sub, step, part, instruction)
            final = instruction == self.weights.instructions - 1
            for i in cutlass.range_constexpr(self.row_groups):
                operand = self.weights.operand([a[i, r] for r in range(4)], scale, i, step, part, instruction)
                for j in cutlass.range_constexpr(self.token_groups):
                    at = (i * self.token_groups + j) * 4
                    before = zeros() if fresh and instruction == 0 else [acc[at + r] for r in range(4)]
                    result = self.instruction(operand, tokens[j], before)
                    for r in cutlass.range_constexpr(4):
                        acc[at + r] = result[r]
                    if cutlass.const_expr(final and i == self.row_groups - 1):
                        self.tokens.replace(b, j, following, x_next)
                        if cutlass.const_expr(final_part):
                            self.load_token_scales(x_scale, j, x_scales_next, (step + 1) % self.steps)
                if cutlass.const_expr(final and final_part):
                    self.load_weight(a, scale, i, w_next, scales_next, (step + 1) % self.steps)

    def token_operands(self, b, x_scale, sub, step, part, instruction):
        """The B operands of all groups of 8 tokens."""
        words = [self.tokens.operand(b, sub, j, instruction) for j in range(self.token_groups)]
        if self.narrow_tokens:
            return [decode.decode_e4m3_fp16(w[instruction]) for w in words]
        if self.ring.native:
            return [self.weights.token_operand(w, x_scale, j, step, part) for j, w in enumerate(words)]
        return words

    @cute.jit
    def turn(
        self, acc, sums, a, b, scale, x_scale, w_at, s_at, x_at, factors_at, full, empty, w_scale, row, next_k,
        weight_scale, stage, phase, slot, used, leaving, more,
    ):  # fmt: skip
        """Multiply a turn, whose first fragments are in registers, and load those of the next.

        Args:
            more: whether there is another. Else this one is loaded again, and nobody uses it.
            used, leaving: barrier of the stage before, and whether this lane gives it back.
            next_k: number of the next turn.

        Returns:
            Stage, phase and slot of the next turn, the barrier of the last stage, and the next weight scale.
        """
        ring = self.ring
        w_offset = slot * ring.w_bytes
        here = slot
        if cutlass.const_expr(ring.parts > 1):
            slot = slot + 1
            if slot == ring.w_slots:
                slot = Int32(0)
        for part in cutlass.range_constexpr(ring.parts):
            x_offset, scales_offset = stage * ring.x_bytes, stage * ring.scale_bytes
            first = part * self.stage_steps
            for sub in cutlass.range_constexpr(self.subs - 1):
                self.multiply(
                    sums, a, scale, b, x_scale, sub, first + sub // self.weights.parts, self.block_scaled and sub == 0,
                    w_at + w_offset, s_at + w_offset, x_at + x_offset, factors_at + scales_offset,
                )  # fmt: skip
            if cutlass.const_expr(self.block_scaled):
                factors = self.scales.factors(weight_scale, factors_at + scales_offset)
                weight_scale = self.scales.weight_scale(w_scale, row, next_k * self.turn_k)
            # Give back the stage before. An arrival can overtake loads from shared memory that the warp issued
            # earlier; all that read that stage were waited for by instructions of its last part. Loads in turn
            # are not moved ahead of an arrival, so it stands behind those of this stage.
            cute.arch.sync_warp()
            bulk.arrive(used, leaving if part == 0 else self.elected())
            used, ahead = empty.toint() + stage * 8, stage
            stage = stage + 1
            if stage == self.config.stages:
                stage, phase = Int32(0), phase ^ 1
            if cutlass.const_expr(ring.parts == 1):
                slot = stage
            if cutlass.const_expr(part < ring.parts - 1):
                cute.arch.mbarrier_wait(full + stage, phase)
                ahead = stage
            elif more:
                cute.arch.mbarrier_wait(full + stage, phase)
                ahead, here = stage, slot
            self.multiply(
                sums, a, scale, b, x_scale, self.subs - 1, first + self.stage_steps - 1, False,
                w_at + here * ring.w_bytes, s_at + here * ring.w_bytes, x_at + ahead * ring.x_bytes,
                factors_at + ahead * ring.scale_bytes,
            )  # fmt: skip
            if cutlass.const_expr(self.block_scaled):
                self.scales.add(acc, sums, factors)
        return stage, phase, slot, used, weight_scale

    def elected(self):
        """Whether this lane arrives for its warp, as Int32."""
        return Int32(1) if self.config.checked else Int32(cute.arch.lane_idx() == 0)

    @cute.jit
    def consume(
        self, w_ring, x_ring, scale_ring, full, empty, flag, affine, col_scale, out, workspace,
        counters, w_scale, m, n, col_stride, share: cutlass.Constexpr, warp, lane, thread,
    ):  # fmt: skip
        """Multiply what arrives in the ring, and write tiles."""
        c, ring = self.config, self.ring
        warp_n = warp % c.warps_n
        warp_t = warp // c.warps_n
        group = warp_n * self.row_groups
        tile_at = w_ring.toint() + (group // 4) * (c.k_tiles * ring.tile_bytes)
        w_at = tile_at + (group % 4) * 1024 + lane * 16
        s_at = w_at
        if cutlass.const_expr(self.weights.scale_bytes > 0):
            s_at = tile_at + _CODE_BYTES + (group % 4) * self.weights.scale_bytes + self.weights.scale_offset(lane)
        x_at = x_ring.toint() + warp_t * (self.token_groups * 8 * ring.row_bytes) + self.tokens.offset(lane)
        elected = self.elected()

        acc = cute.make_rmem_tensor((self.row_groups * self.token_groups * 4,), Float32)
        a = cute.make_rmem_tensor((self.row_groups, 4), Uint32)
        scale, x_scale = a, a
        if cutlass.const_expr(self.weights.scale_bytes > 0):
            scale = cute.make_rmem_tensor((self.weights.scale_registers(self.row_groups),), Uint32)
        if cutlass.const_expr(ring.native):
            x_scale = cute.make_rmem_tensor((self.weights.token_registers(self.token_groups),), Uint32)
        b = cute.make_rmem_tensor(self.tokens.shape, Uint32)
        sums = acc
        if cutlass.const_expr(self.block_scaled):
            sums = cute.make_rmem_tensor((self.row_groups * self.token_groups * 4,), Float32)
        first_token = warp_t * (self.token_groups * 8)
        factors_at = scale_ring.toint() + (first_token + 2 * (lane % 4)) * 4  # of tokens 2 t and 2 t + 1
        if cutlass.const_expr(ring.native):
            factors_at = scale_ring.toint() + first_token * self.weights.unit + self.weights.token_offset(lane)

        stage, phase, slot, done = Int32(0), Int32(0), Int32(0), Int32(0)
        while done < share.work:
            index, k, count, taken = tile_work.piece(share, done)
            row_tile, token_tile = tile_work.tile(share, index)
            done = done + taken
            row = row_tile * c.rows + warp_n * (self.row_groups * 16)
            acc.fill(0.0)
            weight_scale = Float32(0)
            if cutlass.const_expr(self.block_scaled):
                weight_scale = self.scales.weight_scale(w_scale, row, k * self.turn_k)
            cute.arch.mbarrier_wait(full + stage, phase)
            for i in cutlass.range_constexpr(self.row_groups):
                self.load_weight(a, scale, i, w_at + slot * ring.w_bytes, s_at + slot * ring.w_bytes, 0)
            self.tokens.load(b, 0, x_at + stage * ring.x_bytes)
            for j in cutlass.range_constexpr(self.token_groups):
                self.load_token_scales(x_scale, j, factors_at + stage * ring.scale_bytes, 0)
            used, leaving = empty.toint(), Int32(0)
            for i in cutlass.range(count, unroll=1):
                stage, phase, slot, used, weight_scale = self.turn(
                    acc, sums, a, b, scale, x_scale, w_at, s_at, x_at, factors_at, full, empty, w_scale, row,
                    k + i + 1, weight_scale, stage, phase, slot, used, leaving, i + 1 < count,
                )  # fmt: skip
                leaving = elected
            cute.arch.sync_warp()
            bulk.arrive(used, elected)

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
    def launch_native(
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
        """Scales of blocks along K that the instruction applies: the weight's come with its tiles."""
        self.start(
            x, w, affine, col_scale, out, workspace, counters, affine, x_scale, m, n, k, col_stride, ctas, stream
        )  # fmt: skip

    @cute.jit
    def start(
        self, x, w, affine, col_scale, out, workspace, counters, w_scale, x_scale, m, n, k, col_stride, ctas, stream
    ):
        """Make the tensor map of the tokens and launch."""
        copy_x, tokens_map = self.ring.tokens_map(x, m, k)
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
    x_align = 128 // max(8, WEIGHT_BITS[config.activation])
    tile = config.tile_bytes
    matrices = (
        make_fake_tensor(
            _X_TYPES[config.activation], (size(), size()), (wide(divisibility=x_align), 1), assumed_align=16
        ),
        make_fake_tensor(Uint8, (size(), size(), tile), (wide(), tile, 1), assumed_align=16),
        make_fake_tensor(Float32, (2, size()), (wide(), 1), assumed_align=16),
        vector(Float32),
        make_fake_tensor(OUT_TYPES[config.out], (size(), size()), (wide(), 1)),
        vector(Float32),
        vector(Int32),
    )
    kernel = TiledLinear(config)
    entry, scales = kernel.launch, ()
    if kernel.ring.native:
        tiles = make_fake_tensor(Uint8, (size(), size(), size()), (wide(divisibility=16), wide(), 1), assumed_align=16)
        entry, scales = kernel.launch_native, (tiles,)
    if kernel.block_scaled:
        matrix = make_fake_tensor(Float32, (size(), size()), (wide(), 1))
        entry, scales = kernel.launch_weight_block, (matrix,)
        if kernel.ring.by_block:
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
