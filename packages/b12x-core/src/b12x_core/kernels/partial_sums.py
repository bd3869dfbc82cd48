"""Sums over K of a tile that blocks of threads share, in fragments of the matrix instruction.

The same protocol as `split_k`, for tiles that fill the registers: parts are read a few registers at a time. Every block
leaves its part and counts itself in; the last one gathers all parts in the order of blocks and sets the counter back.
Nobody waits, and the sum does not depend on who is last.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from b12x_core.kernels import tile_work

_CHUNK = 8  # fragments that are read at a time
_AHEAD = 2  # parts that are read at the same time


class PartialSums:
    """The reduction of one configuration.

    Args:
        fragments: fragments of 4 fp32 that a thread has.
        warps: warps of a block that have fragments, its first ones; they alone call.
        barrier_id: a named barrier for them.
    """

    def __init__(self, fragments, warps, barrier_id):
        self.fragments = fragments
        self.warps = warps
        self.barrier_id = barrier_id

    @cute.jit
    def address(self, workspace, slot, warp, lane):
        """Where this lane has its fragments in a slot of the workspace."""
        place = (Int64(slot) * self.warps + Int64(warp)) * (self.fragments * 512)
        return workspace.iterator.toint() + place + Int64(lane * 16)

    @cute.jit
    def join(self, acc, workspace, counters, flag, share: cutlass.Constexpr, shared, warp, lane, thread):
        """Leave the partial sum of a shared tile; in the last block to come, replace it by the whole.

        Args:
            acc: fp32 registers [fragment][4].
            workspace: fp32, 2 slots of a tile for every block.
            counters: int32, zero for every shared tile.
            flag: pointer to an Int32 in shared memory.
            share: the block's `tile_work.Share`.
            shared: number of the tile among the shared ones.

        Returns:
            Whether `acc` is the whole sum.
        """
        threads = 32 * self.warps
        first, final = tile_work.owners(share, shared)
        at = self.address(workspace, tile_work.slot(share, share.block, shared), warp, lane)
        for f in cutlass.range_constexpr(self.fragments):
            cute.arch.inline_ptx(
                f"st.global.v4.f32 [{{$r0}}+{f * 512}], {{ {{$r1}}, {{$r2}}, {{$r3}}, {{$r4}} }};",
                read_only_args=[at, *[acc[4 * f + r] for r in range(4)]],
            )
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=threads)
        if thread == 0:
            # the barrier put the stores of all threads before this release
            counter = counters.iterator.toint() + Int64(shared) * 4
            before = cute.arch.inline_ptx(
                "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[counter]
            )
            last = Int32(0)
            if before == final - first:
                last = Int32(1)
                counters[shared] = Int32(0)
            flag[0] = last
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=threads)
        last = flag[0]
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=threads)
        if last != 0:
            # of two parts the own one stays in registers: their order does not matter
            pair = final - first == 1
            if not pair:
                acc.fill(0.0)
            for chunk in cutlass.range_constexpr(0, self.fragments, _CHUNK):
                self.gather(acc, workspace, share, shared, first, final, pair, chunk, warp, lane)
        return last != 0

    @cute.jit
    def gather(
        self, acc, workspace, share: cutlass.Constexpr, shared, first, final, pair, chunk: cutlass.Constexpr, warp, lane
    ):
        """Add all parts, or of a pair the other one, to some fragments."""
        size = min(_CHUNK, self.fragments - chunk)
        parts = cute.make_rmem_tensor((_AHEAD, 4 * size), Float32)
        for begin in cutlass.range(first, final + 1, _AHEAD, unroll=1):
            for a in cutlass.range_constexpr(_AHEAD):
                for r in cutlass.range_constexpr(4 * size):
                    parts[a, r] = Float32(0)
                other = begin + a
                if other <= final and (not pair or other != share.block):
                    at = self.address(workspace, tile_work.slot(share, other, shared), warp, lane)
                    for f in cutlass.range_constexpr(size):
                        words = cute.arch.inline_ptx(
                            "ld.global.cg.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}+" + f"{(chunk + f) * 512}];",
                            write_only_types=[Float32] * 4,
                            read_only_args=[at],
                        )
                        for r in cutlass.range_constexpr(4):
                            parts[a, 4 * f + r] = words[r]
            for a in cutlass.range_constexpr(_AHEAD):
                for r in cutlass.range_constexpr(4 * size):
                    acc[4 * chunk + r] = acc[4 * chunk + r] + parts[a, r]
