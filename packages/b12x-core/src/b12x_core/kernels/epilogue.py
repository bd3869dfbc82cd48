"""From accumulators to the output: scales at the end, bias, conversion, transposition and masked stores.

An accumulator fragment holds the output transposed: lane 4 g + t has weight rows g and g + 8 of two tokens 2 t and
2 t + 1. Rows are contiguous in the output, so 16-bit results change owners inside the warp, without shared memory:
`movmatrix` gives each lane two neighbouring rows of one token, and an exchange among the four lanes of a token makes
that eight neighbouring rows: stores of 16 bytes, 64 contiguous bytes a token. 32-bit results are stored as they are:
eight lanes write the 32 bytes of a sector.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int64, Uint32, cute

OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}

_PACK = {"bf16": "cvt.rn.bf16x2.f32", "fp16": "cvt.rn.f16x2.f32"}


def pack(kind, low, high):
    """Two fp32 -> a register of two 16-bit numbers, rounded to nearest even."""
    return cute.arch.inline_ptx(
        f"{_PACK[kind]} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def transpose(word):
    """Transpose an 8 x 8 matrix of 16-bit elements whose row g is in lanes 4 g to 4 g + 3."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word]
    )


def select(condition, yes, no):
    """`yes` where the condition holds, without a branch."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Uint32],
        read_only_args=[condition, yes, no],
    )


def exchange(words, lane):
    """Transpose 4 registers among the 4 lanes of a quad: lane t gets register t of all four, in the order of lanes."""
    odd, upper = lane & 1, lane & 2
    kept, given = [], []
    for pair in (0, 2):
        mine = select(odd, words[pair + 1], words[pair])
        theirs = cute.arch.shuffle_sync_bfly(select(odd, words[pair], words[pair + 1]), 1)
        kept.append((select(odd, theirs, mine), select(odd, mine, theirs)))
    mine = [select(upper, kept[1][i], kept[0][i]) for i in (0, 1)]
    given = [cute.arch.shuffle_sync_bfly(select(upper, kept[0][i], kept[1][i]), 2) for i in (0, 1)]
    return [
        select(upper, given[0], mine[0]),
        select(upper, given[1], mine[1]),
        select(upper, mine[0], given[0]),
        select(upper, mine[1], given[1]),
    ]


def store_words(address, words):
    """Store 4 registers at an aligned global address."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, *words],
    )


def store_half(address, word, high):
    """Store the low or the high half of a register."""
    which = "hi" if high else "lo"
    cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r1}; st.global.b16 [{$r0}], " + which + "; }",
        read_only_args=[address, word],
    )


class Epilogue:
    """Writes a warp's part of a tile.

    Args:
        out: "bf16", "fp16" or "fp32".
        row_groups: groups of 16 rows a warp has (1, 2 or a multiple of 2).
        token_groups: groups of 8 tokens a warp has.
    """

    def __init__(self, out, row_groups, token_groups):
        self.out = out
        self.row_groups = row_groups
        self.token_groups = token_groups

    @cute.jit
    def __call__(self, acc, affine, col_scale, col_stride, out, m, n, row, token, lane):
        """out[token, row] = acc * affine[0, row] * col_scale[token] + affine[1, row], where inside the matrix.

        Args:
            acc: fp32 registers [row group][token group][4].
            affine: fp32 (2, padded N).
            col_scale: fp32, read at token * col_stride.
            out: (M, N), unit stride along N.
            row, token: the first of the warp's.
        """
        g, t = lane // 4, lane % 4
        # everything is asked for before anything is needed
        scale = cute.make_rmem_tensor((2 * self.row_groups,), Float32)
        bias = cute.make_rmem_tensor((2 * self.row_groups,), Float32)
        columns = cute.make_rmem_tensor((2 * self.token_groups,), Float32)
        scale.fill(0.0)
        bias.fill(0.0)
        columns.fill(0.0)
        for i in cutlass.range_constexpr(2 * self.row_groups):
            r = row + 8 * i + g
            if r < n:
                scale[i] = affine[0, r]
                bias[i] = affine[1, r]
        for i in cutlass.range_constexpr(2 * self.token_groups):
            c = token + 8 * (i // 2) + 2 * t + i % 2
            if c < m:
                columns[i] = col_scale[c * col_stride]
        if cutlass.const_expr(self.out == "fp32"):
            self.store_32(acc, scale, bias, columns, out, m, n, row + g, token + 2 * t)
        else:
            self.store_16(acc, scale, bias, columns, out, m, n, row, token, lane)

    @cute.jit
    def store_32(self, acc, scale, bias, columns, out, m, n, row, token):
        """Store fp32 results as they are."""
        for j in cutlass.range_constexpr(2 * self.token_groups):
            mine = token + 8 * (j // 2) + j % 2
            start = out.iterator.toint() + (Int64(mine) * Int64(out.stride[0]) + Int64(row)) * 4
            for i in cutlass.range_constexpr(2 * self.row_groups):
                if mine < m and row + 8 * i < n:
                    a = acc[((i // 2) * self.token_groups + j // 2) * 4 + 2 * (i % 2) + j % 2]
                    cute.arch.inline_ptx(
                        f"st.global.f32 [{{$r0}}+{32 * i}], {{$r1}};",
                        read_only_args=[start, a * scale[i] * columns[j] + bias[i]],
                    )

    @cute.jit
    def store_16(self, acc, scale, bias, columns, out, m, n, row, token, lane):
        """Store 16-bit results, eight neighbouring rows of a token at a time."""
        g, t = lane // 4, lane % 4
        base = out.iterator.toint()
        pitch = Int64(out.stride[0]) * 2
        aligned = ((base | pitch) & Int64(15)) == Int64(0)
        row_blocks = 2 * self.row_groups  # of 8 rows
        for j in cutlass.range_constexpr(self.token_groups):
            words = []
            for i in cutlass.range_constexpr(row_blocks):
                at = ((i // 2) * self.token_groups + j) * 4 + 2 * (i % 2)
                low = acc[at] * scale[i] * columns[2 * j] + bias[i]
                high = acc[at + 1] * scale[i] * columns[2 * j + 1] + bias[i]
                words.append(transpose(pack(self.out, low, high)))
            mine = token + 8 * j + g
            start = base + Int64(mine) * pitch
            for quarter in cutlass.range_constexpr(0, row_blocks, 4):
                if cutlass.const_expr(row_blocks >= quarter + 4):
                    eight = exchange(words[quarter : quarter + 4], lane)
                    first = row + 8 * quarter + 8 * t
                    self.store_row(eight, start, first, first + 8 <= n, aligned, mine < m, n)
                else:
                    for i in cutlass.range_constexpr(quarter, row_blocks):
                        self.store_pair(words[i], start, row + 8 * i + 2 * t, mine < m, n)

    @cute.jit
    def store_row(self, eight, start, first, whole, aligned, live, n):
        """Store eight rows of a token, at once where they exist and are aligned."""
        if live:
            if aligned and whole:
                store_words(start + Int64(first) * 2, eight)
            else:
                for i in cutlass.range_constexpr(4):
                    self.store_pair(eight[i], start, first + 2 * i, Boolean(True), n)

    @cute.jit
    def store_pair(self, word, start, row, live, n):
        """Store two rows of a token, those that exist."""
        for h in cutlass.range_constexpr(2):
            if live and row + h < n:
                store_half(start + Int64(row + h) * 2, word, h == 1)
