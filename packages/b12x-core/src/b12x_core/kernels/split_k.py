"""Sums over K that several blocks of threads share: the last one to arrive adds all parts in a fixed order.

Every block that has a part of a tile stores it and counts itself in at the tile's counter. The one that finds all
others counted adds the parts, its own included, in the order of their numbers: the result does not depend on which
block it was. It sets the counter back to zero. Nobody waits for anybody, so blocks need not run at the same time.

Thread i of one block and thread i of another must own the same elements of the tile.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

_LOADS = 16  # loads of a thread that are under way at the same time, where parts are small


class SplitK:
    """The reduction for a given division of a tile among threads.

    Args:
        elements: elements of the tile that a thread has.
        threads: threads of a block that have elements, numbered from 0; they alone call the methods.
        barrier_id: a named barrier for them.
    """

    def __init__(self, elements, threads, barrier_id):
        self.elements = elements
        self.threads = threads
        self.barrier_id = barrier_id
        self.ahead = max(1, min(4, _LOADS // elements))  # parts that are loaded together

    @property
    def slot_size(self):
        """fp32 numbers of workspace that a part takes."""
        return self.elements * self.threads

    def _address(self, workspace, slot, thread):
        return workspace.iterator.toint() + Int64(slot) * (self.slot_size * 4) + Int64(thread * 4)

    @cute.jit
    def store(self, values, workspace, slot, thread):
        """Leave a part, `values` of fp32 (elements,), in a slot of the workspace."""
        at = self._address(workspace, slot, thread)
        for e in cutlass.range_constexpr(self.elements):
            cute.arch.inline_ptx(
                f"st.global.f32 [{{$r0}}+{e * self.threads * 4}], {{$r1}};", read_only_args=[at, values[e]]
            )

    @cute.jit
    def arrive(self, tiles, flags, thread):
        """Count this block in at tiles that it has stored parts of.

        Args:
            tiles: a list of (Int64 address of the tile's Int32 counter, Int32 blocks that share it). Nothing happens to
                a tile with 0 blocks.
            flags: pointer to as many Int32 in shared memory; afterwards not 0 where all parts of a tile are there,
                which is so in exactly one block.
        """
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=self.threads)
        if thread == 0:
            # the barrier put the stores of all threads before this fence
            cute.arch.fence_acq_rel_gpu()
            before = cute.make_rmem_tensor((len(tiles),), Int32)
            for i in cutlass.range_constexpr(len(tiles)):
                before[i] = Int32(-2)
                if tiles[i][1] > 0:
                    before[i] = cute.arch.inline_ptx(
                        "atom.acquire.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
                        write_only_types=[Int32],
                        read_only_args=[tiles[i][0]],
                    )
            for i in cutlass.range_constexpr(len(tiles)):
                complete = Int32(0)
                if before[i] == tiles[i][1] - 1:
                    complete = Int32(1)
                    cute.arch.inline_ptx("st.global.u32 [{$r0}], 0;", read_only_args=[tiles[i][0]])
                flags[i] = complete
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=self.threads)

    @cute.jit
    def gather(self, values, workspace, first, others, step, parts, thread):
        """`values` = the sum of all parts, part 0 in slot `first`, part i > 0 in slot `others` + i * `step`."""
        values.fill(0.0)
        loaded = cute.make_rmem_tensor((self.ahead, self.elements), Float32)
        for begin in cutlass.range(0, parts, self.ahead, unroll=1):
            # no branches, so that all loads are under way together; the last part stands in for those beyond it
            for a in cutlass.range_constexpr(self.ahead):
                part = cutlass.min(begin + a, parts - 1)
                at = self._address(workspace, cutlass.select_(part == 0, first, others + part * step), thread)
                for e in cutlass.range_constexpr(self.elements):
                    loaded[a, e] = cute.arch.inline_ptx(
                        f"ld.global.cg.f32 {{$w0}}, [{{$r0}}+{e * self.threads * 4}];",
                        write_only_types=[Float32],
                        read_only_args=[at],
                    )
            for a in cutlass.range_constexpr(self.ahead):
                for e in cutlass.range_constexpr(self.elements):
                    values[e] = values[e] + cutlass.select_(begin + a < parts, loaded[a, e], Float32(0))
