"""Equal shares of a line of work: how `linear_stream` divides a weight among the blocks of its grid.

The line is the weight cut into pieces, tile after tile, `per_tile` pieces each. Block b takes a contiguous share of
`base` pieces, or `base` + 1 for the first `extra` blocks. A share is the end of a tile that an earlier block begins,
whole tiles, and the beginning of a tile that a later block ends; any of the three may be missing. These parts are
called segments.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute


@cute.jit
def begin_of(block, base, extra):
    """The first piece of a block."""
    return block * base + cutlass.min(block, extra)


@cute.jit
def owner_of(piece, base, extra):
    """The block that has a piece."""
    longer = extra * (base + 1)
    owner = piece // (base + 1)
    if piece >= longer:
        owner = extra + (piece - longer) // cutlass.max(base, 1)
    return owner


@cute.jit
def share_of(block, base, extra, per_tile):
    """What a block has.

    Returns:
        Tile, first piece and pieces of the end of a tile; tile and pieces of the beginning of one; first whole tile,
        and the number of whole tiles. No pieces: there is no such segment.
    """
    begin = begin_of(block, base, extra)
    end = begin_of(block + 1, base, extra)
    head = begin // per_tile
    tail = end // per_tile
    head_piece = begin - head * per_tile
    head_size = Int32(0)
    whole = head
    if head_piece > 0:
        head_size = cutlass.min(per_tile - head_piece, end - begin)
        whole = head + 1
    tail_size = cutlass.max(end - cutlass.max(tail * per_tile, begin + head_size), 0)
    return head, head_piece, head_size, tail, tail_size, whole, cutlass.max(tail - whole, 0)


@cute.jit
def divided(share):
    """How many segments of a share are of tiles that other blocks have parts of."""
    _, _, head_size, _, tail_size, _, _ = share
    count = Int32(0)
    if head_size > 0:
        count = count + 1
    if tail_size > 0:
        count = count + 1
    return count


@cute.jit
def segment_of(index, share, per_tile):
    """Tile, first piece and pieces of a segment; those of divided tiles come first."""
    head, head_piece, head_size, tail, tail_size, whole, _ = share
    tile, piece, size = whole + index, Int32(0), per_tile
    if head_size > 0:
        tile = tile - 1
    if tail_size > 0:
        tile = tile - 1
        if tile < whole:
            tile, size = tail, tail_size
    if head_size > 0 and index == 0:
        tile, piece, size = head, head_piece, head_size
    return tile, piece, size


@cute.jit
def sharers_of(tile, size, base, extra, per_tile):
    """The first of the blocks that share a tile, and how many they are; 0 where this block has no part of it."""
    owner, parts = Int32(0), Int32(0)
    if size > 0:
        owner = owner_of(tile * per_tile, base, extra)
        parts = owner_of(tile * per_tile + per_tile - 1, base, extra) - owner + 1
    return owner, parts
