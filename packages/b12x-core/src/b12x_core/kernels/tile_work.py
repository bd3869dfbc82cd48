"""Which tiles of an output, and which part of K, each block of threads of a persistent grid computes.

While there are enough tiles for all blocks, every block takes whole ones. The tiles that are left are shared: cut along
K into equal parts where at least two blocks come on a tile, else divided so that all blocks get the same, where that
saves more than the additions cost. Of one tile of tokens all tiles may be divided so: their weights are read once
anyhow. Lengths along K are counted in stages of the pipeline; costs, in the time that a tile takes for 64 bytes of K of
its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

_BAND = 16  # token tiles that are walked together, so that their operands stay in L2
_PART_COST = 4  # what another part of a tile costs
_SHARE_COST = 24  # what sharing costs at all
_MOST_SHARED = 1024  # tiles that may be shared: counters that a launch has


@dataclass(frozen=True)
class Share:
    """One block's work, and what it needs to find its place in it: Int32 each.

    Attributes:
        block, blocks: number of this block, and of all.
        row_tiles, token_tiles: tiles of the output.
        stages: stages of a tile.
        whole: tiles that are not shared, a multiple of `blocks`.
        length: stages of a shared tile, rounded up to a multiple of its parts.
        quotient, remainder: stages of shared tiles that every block has, and blocks that have one more.
        begin: where this block's share begins, in stages of the shared tiles one after another.
        work: stages of this block's whole and shared tiles together.
    """

    block: Int32
    blocks: Int32
    row_tiles: Int32
    token_tiles: Int32
    stages: Int32
    whole: Int32
    length: Int32
    quotient: Int32
    remainder: Int32
    begin: Int32
    work: Int32


@cute.jit
def _begin(block, quotient, remainder):
    return block * quotient + cutlass.min(block, remainder)


@cute.jit
def _divide(row_tiles, token_tiles, stages, cost, block, blocks):
    tiles = row_tiles * token_tiles
    whole = tiles // blocks * blocks
    rest = tiles - whole
    length, quotient, remainder, sharing = stages, Int32(0), Int32(0), Int32(0)
    if rest > 0:
        most = blocks // rest
        quotient, sharing = stages, rest
        evenly = rest * stages * cost // blocks + _SHARE_COST  # what equal shares cost, behind whole tiles
        unevenly = stages * cost
        if most == 1:
            # shares that begin anywhere along K lose the reuse of operands in L2, about a quarter of the time
            if (blocks * 3 - rest * 4) * stages * cost > 4 * blocks * _SHARE_COST:
                unevenly = evenly
                sharing = blocks
                quotient = rest * stages // blocks
                remainder = rest * stages - quotient * blocks
        elif stages * cost > _SHARE_COST + _PART_COST:
            parts = Int32(2)
            while (parts < most) & (parts * (parts + 1) * _PART_COST < stages * cost):
                parts = parts + 1
            quotient = (stages + parts - 1) // parts
            unevenly = quotient * cost + parts * _PART_COST
            length = quotient * parts
            sharing = rest * parts
        if (token_tiles == 1) & (whole > 0) & (tiles <= _MOST_SHARED) & (evenly < unevenly):
            whole, length, sharing = Int32(0), stages, blocks
            quotient = tiles * stages // blocks
            remainder = tiles * stages - quotient * blocks
    begin, end = Int32(0), Int32(0)
    if block < sharing:
        begin = _begin(block, quotient, remainder)
        end = _begin(block + 1, quotient, remainder)
    return whole, length, quotient, remainder, begin, (whole // blocks) * stages + end - begin


def share(row_tiles, token_tiles, stages, cost, block, blocks):
    """The share of a block; `cost`: of a stage."""
    return Share(
        block,
        blocks,
        row_tiles,
        token_tiles,
        stages,
        *_divide(row_tiles, token_tiles, stages, cost, block, blocks),
    )


@cute.jit
def _piece(block, blocks, stages, whole, length, begin, work, done):
    round_ = done // stages
    index = block + round_ * blocks
    k = done - round_ * stages
    left = stages - k
    if index >= whole:
        position = begin + done - (whole // blocks) * stages
        index = position // length
        k = position - index * length
        left = length - k
        index = index + whole
    taken = cutlass.min(left, work - done)
    return index, k, cutlass.min(k + taken, stages) - k, taken


def piece(s, done):
    """What follows after `done` stages of a share.

    Returns:
        Index of the tile in the order of work, first stage, number of stages, and what to add to `done`.
    """
    return _piece(s.block, s.blocks, s.stages, s.whole, s.length, s.begin, s.work, done)


@cute.jit
def _tile(index, row_tiles, token_tiles):
    per_band = _BAND * row_tiles
    band = index // per_band
    within = index - band * per_band
    width = cutlass.min(token_tiles - band * _BAND, _BAND)
    row_tile = within // width
    return row_tile, band * _BAND + (within - row_tile * width)


def tile(s, index):
    """Row tile and token tile of an index: bands of token tiles, and in each rows slowest."""
    return _tile(index, s.row_tiles, s.token_tiles)


@cute.jit
def _owner(position, quotient, remainder):
    edge = remainder * (quotient + 1)
    block = position // (quotient + 1)
    if position >= edge:
        block = remainder + (position - edge) // quotient
    return block


def owners(s, shared):
    """First and last of the blocks, all neighbours, that have a part of a shared tile."""
    return (
        _owner(shared * s.length, s.quotient, s.remainder),
        _owner((shared + 1) * s.length - 1, s.quotient, s.remainder),
    )


@cute.jit
def _slot(quotient, remainder, length, block, shared):
    second = Int32(0)
    if _begin(block, quotient, remainder) < shared * length:
        second = Int32(1)
    return 2 * block + second


def slot(s, block, shared):
    """Where a block keeps its part of a shared tile: it has parts of two at most."""
    return _slot(s.quotient, s.remainder, s.length, block, shared)
