"""Scales of blocks along K: sums of a block are kept apart and added, scaled, to the total in fp32.

A weight scale holds for 128 rows and 128 of K, so for everything a warp has of a stage; a token scale for one token and
128 of K. Tensor cores may add with fewer bits than fp32 has, hence the short sums gain accuracy besides.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from b12x_core.kernels import bulk

BLOCK = 128
"""Rows, and elements of K, that share a weight scale; elements of K that share a token scale."""


class BlockScales:
    """The scales of one warp's part of a tile.

    Args:
        row_groups: groups of 16 rows a warp has, all in one block of rows.
        token_groups: groups of 8 tokens a warp has.
        per_token: whether tokens have scales too.
    """

    def __init__(self, row_groups, token_groups, per_token):
        self.row_groups = row_groups
        self.token_groups = token_groups
        self.per_token = per_token

    @cute.jit
    def weight_scale(self, w_scale, row, k):
        """The scale of the block with row `row` and element `k` of K, clamped: nobody uses what lies beyond edges."""
        i = cutlass.min(row // BLOCK, Int32(w_scale.shape[0]) - 1)
        j = cutlass.min(k // BLOCK, Int32(w_scale.shape[1]) - 1)
        return w_scale[i, j]

    @cute.jit
    def factors(self, weight, tokens_at):
        """Scales of tokens 2 t and 2 t + 1 of every group times `weight`; `tokens_at`: shared memory, of this lane."""
        both = []
        for j in cutlass.range_constexpr(self.token_groups):
            if cutlass.const_expr(self.per_token):
                first, second = bulk.load_shared_pair(tokens_at, j * 32)
                both.append((first * weight, second * weight))
            else:
                both.append((weight, weight))
        return both

    @cute.jit
    def add(self, total, part, factors):
        """Add part * factors to total."""
        for i in cutlass.range_constexpr(self.row_groups):
            for j in cutlass.range_constexpr(self.token_groups):
                for r in cutlass.range_constexpr(4):
                    at = (i * self.token_groups + j) * 4 + r
                    total[at] = total[at] + part[at] * factors[j][r % 2]


def zeros():
    """Four zeros, where a sum begins."""
    return [Float32(0)] * 4
