"""Weights laid out as the matrix instruction reads them: the layout that every linear kernel shares.

A weight (N, K) of 8 or 16 bits an element is cut into tiles of 64 rows by 64 bytes of K, padded with zeros. The 4096
bytes of a tile are ordered [4 groups of 16 rows][2 steps of 32 bytes of K][32 lanes][16 bytes], so that 16 bytes a lane
are the four registers of an `mma` A fragment (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "mma.m16n8k32"; both
have the same structure in bytes). Lane 4 g + t holds, of each step, bytes 4 t to 4 t + 3 of rows g and g + 8, then
bytes 16 + 4 t to 16 + 4 t + 3 of both.

An 8-bit weight beside 16-bit activations feeds two instructions of 16 k with one step. There lane t holds k = 2 t,
2 t + 1, 2 t + 8, 2 t + 9 of the first 16 in its first word and of the second 16 in its second: the order in which the
instruction wants 16-bit operands.
"""

from __future__ import annotations

import torch

from b12x_core.planning.linear import K_TILE_BYTES, TILE_ROWS

GROUPS, STEPS = TILE_ROWS // 16, K_TILE_BYTES // 32
"""Groups of 16 rows of a tile, and steps of 32 bytes of K."""

ORDERS = {
    "plain": (torch.int32, (STEPS, 2, 4), (0, 4, 1, 5, 3, 7, 6, 2)),  # K: step, word, t
    "widened": (torch.int16, (STEPS, 2, 2, 4), (0, 4, 1, 5, 3, 8, 6, 2, 7)),  # K: step, word, part of the word, t
    "runs": (torch.int32, (STEPS, 4, 2), (0, 4, 1, 5, 3, 6, 7, 2)),  # K: step, t, word
}
"""How bytes of K become fragments: what stays together, the dimensions of K in a tile, and the permutation.

It makes (R, C, group, step, g, t, word, half, ...) of (R, group, half, g, C, *K).
"""


def fragments(padded: torch.Tensor, order: str) -> torch.Tensor:
    """A view of bytes (64 R, 64 C) in the order of tiles."""
    unit, k, permutation = ORDERS[order]
    view: torch.Tensor = padded.view(unit).unflatten(0, (-1, GROUPS, 2, 8)).unflatten(-1, (-1, *k))
    return view.permute(permutation)


def pad_to_tiles(stored: torch.Tensor) -> torch.Tensor:
    """Bytes (N, B), padded with zeros to whole tiles."""
    padding = (0, -stored.shape[1] % K_TILE_BYTES, 0, -stored.shape[0] % TILE_ROWS)
    return torch.nn.functional.pad(stored, padding) if any(padding) else stored


def pack_weight(weight: torch.Tensor, *, widened: bool = False) -> torch.Tensor:
    """Lay out a weight in tiles.

    Args:
        weight: (N, K) of 1 or 2 bytes an element, any strides.
        widened: whether an 8-bit weight is decoded to 16 bits for 16-bit activations.

    Returns:
        (ceil(N / 64), ceil(K * bytes / 64), 4096) uint8, a new tensor.
    """
    padded = pad_to_tiles(weight.contiguous().view(torch.uint8))
    tiles = fragments(padded, "widened" if widened else "plain")
    packed = torch.empty(tiles.shape, dtype=tiles.dtype, device=tiles.device)
    packed.copy_(tiles)
    return packed.view(*tiles.shape[:2], -1).view(torch.uint8)


def unpack_weight(packed: torch.Tensor, n: int, k: int, dtype: torch.dtype, *, widened: bool = False) -> torch.Tensor:
    """The (n, k) weight of `dtype` that `pack_weight` laid out."""
    rows, columns, _ = packed.shape
    plain = torch.empty((rows * TILE_ROWS, columns * K_TILE_BYTES), dtype=torch.uint8, device=packed.device)
    tiles = fragments(plain, "widened" if widened else "plain")
    tiles.copy_(packed.view(tiles.dtype).view(tiles.shape))
    return plain.view(dtype)[:n, :k]
