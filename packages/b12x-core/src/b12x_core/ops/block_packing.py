"""Weights with a scale for each row and 16 or 32 of K, laid out in tiles that hold codes and scales.

A tile has 64 rows by 64 bytes of K of codes, ordered as in `b12x_core.ops.packing`, [4 groups of 16 rows][2 steps of 32
bytes][lane 4 g + t][16 bytes], and behind these 4096 bytes the scales of the same rows and k. There are two packings.

"native": the block-scaled matrix instructions take codes and scales as they are.
    Codes as in `packing`, two e2m1 a byte, the low nibble for the even k. For e4m3 activations, whose instruction takes
    32 k where a step of e2m1 has 64, byte i of a step holds k = i in the low nibble and k = 32 + i in the high one.
    Scales [group][g][row g or g + 8][step][scales of the step], one byte each.

"decoded": the kernel decodes the weight to 16 bits.
    e2m1: of the 64 k of a step lane t holds k = 16 t to 16 t + 15 of rows g and g + 8, in words of 8: [k of 8][row g or
    g + 8]. Bits are placed so that few instructions decode a word into four registers of two numbers: in half h of its
    bits, code i of k = 2 i + h has its magnitude at bit `_MAGNITUDE[i]` and its sign at bit `_SIGN[i]`.
    e4m3: as in `packing`, widened.
    Scales [group][g][block of the step][step][row g or g + 8], one byte each, in a code of their own. With e the
    exponent and m the three bits of the mantissa of an e4m3 scale, made normal if it is not, "nv16" has
    (e + 18) << 3 | m; "mx32" has 254 - r + s for an e8m0 scale s in a row whose largest is r, 0 where that would be
    less than 1. Decoders multiply codes with scales exactly, except in rows whose e8m0 scales differ by more than 2^126
    (2^24 beside fp16 activations). What they leave for the end, a power of two of each row, is the `factor` of
    `pack_blocks`.
"""

from __future__ import annotations

from functools import cache

import torch

from b12x_core.formats import NVFP4, Element, Format
from b12x_core.ops.packing import GROUPS, STEPS, fragments, pad_to_tiles
from b12x_core.planning.linear import K_TILE_BYTES, TILE_ROWS

CODE_BYTES = TILE_ROWS * K_TILE_BYTES
"""Where the scales of a tile begin."""

_MAGNITUDE = (6, 3, 0, 13)
_SIGN = (11, 12, 9, 10)
_CHUNK_BYTES = 1 << 22  # of codes that are repacked at a time, so that temporary tensors stay small

NV_FACTOR = 2.0**11
"""The `factor` of decoded rows of nvfp4."""

_MX_FACTOR = {Element.E2M1: -128, Element.E4M3: -134}  # log2 of that of mxfp4 and mxfp8, the largest e8m0 aside
_E8M0_NAN = 255


def pack_blocks(
    codes: torch.Tensor, scale: torch.Tensor, fmt: Format, *, decoded: bool, split_nibbles: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay out a weight and its scales in tiles.

    Args:
        codes: (N, K) e4m3 or (N, K / 2) uint8 for e2m1, low nibble = even k.
        scale: uint8 (N, K / block), e4m3 or e8m0.
        fmt: mxfp8, mxfp4 or nvfp4.
        decoded: which packing: decoded or native.
        split_nibbles: native e2m1 beside e4m3 activations.

    Returns:
        packed: uint8 (ceil(N / 64), tiles along K, 4096 and the bytes of scales).
        factor: float32 (N,), what a row's sum must be multiplied with; NaN where a scale of the row is NaN.
    """
    stored = codes.contiguous().view(torch.uint8)
    n, width = stored.shape
    columns = -(-width // K_TILE_BYTES)
    blocks = K_TILE_BYTES * fmt.packed // _block(fmt)  # of a row, in a tile
    shape = (-(-n // TILE_ROWS), columns, CODE_BYTES + TILE_ROWS * blocks)
    packed = torch.empty(shape, dtype=torch.uint8, device=stored.device)
    factor = torch.ones(n, dtype=torch.float32, device=stored.device)
    height = max(1, _CHUNK_BYTES // (TILE_ROWS * K_TILE_BYTES * columns)) * TILE_ROWS
    for first in range(0, n, height):
        rows = slice(first, first + height)
        part, scales = stored[rows], scale[rows].contiguous()
        nan = ((scales & 127) == 127 if fmt == NVFP4 else scales == _E8M0_NAN).any(1)
        if fmt == NVFP4:
            part, scales = _without_signs(part, scales)
        if decoded:
            part, scales, factor[rows] = _recode(part, scales, fmt)
        elif split_nibbles:
            part = _split_nibbles(pad_to_tiles(part))
        factor[rows] = factor[rows].masked_fill(nan, float("nan"))
        into = packed[first // TILE_ROWS : (first + height) // TILE_ROWS]
        view = fragments(pad_to_tiles(part), _order(fmt, decoded))
        into[..., :CODE_BYTES].view(view.dtype).unflatten(-1, view.shape[2:]).copy_(view)
        ordered = _scale_order(_pad_scales(scales, into.shape[0], columns, blocks), decoded)
        into[..., CODE_BYTES:].unflatten(-1, ordered.shape[2:]).copy_(ordered)
    return packed, factor


def unpack_blocks(
    packed: torch.Tensor,
    factor: torch.Tensor,
    n: int,
    k: int,
    fmt: Format,
    *,
    decoded: bool,
    split_nibbles: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_blocks`.

    Values come back exactly, but for "mxfp4" and "mxfp8" blocks too far below the largest of their row to be decoded.
    Codes and scales may differ where values do not: a block whose scale is 0 comes back with codes of 0, and signs of
    scales as those of codes. A decoded row of "mxfp4" or "mxfp8" with a NaN is all NaN.

    Returns:
        codes: uint8 (n, K) or (n, K / 2).
        scale: uint8 (n, K / block).
    """
    rows, columns, _ = packed.shape
    plain = torch.empty((rows * TILE_ROWS, columns * K_TILE_BYTES), dtype=torch.uint8, device=packed.device)
    view = fragments(plain, _order(fmt, decoded))
    view.copy_(packed[..., :CODE_BYTES].contiguous().view(view.dtype).unflatten(-1, view.shape[2:]))
    blocks = K_TILE_BYTES * fmt.packed // _block(fmt)
    scales = torch.empty((rows * TILE_ROWS, columns * blocks), dtype=torch.uint8, device=packed.device)
    ordered = _scale_order(scales.unflatten(1, (columns, blocks)), decoded)
    ordered.copy_(packed[..., CODE_BYTES:].unflatten(-1, ordered.shape[2:]))
    if split_nibbles and not decoded:
        plain = _join_nibbles(plain)
    codes, scales = plain[:n, : k // fmt.packed], scales[:n, : k // _block(fmt)]
    return _restore(codes, scales, factor[:n], fmt) if decoded else (codes, scales)


def _block(fmt: Format) -> int:
    assert fmt.block is not None
    return fmt.block[1]


def _order(fmt: Format, decoded: bool) -> str:
    if not decoded:
        return "plain"
    return "runs" if fmt.element is Element.E2M1 else "widened"


def _pad_scales(scales: torch.Tensor, rows: int, columns: int, blocks: int) -> torch.Tensor:
    """Scales of whole tiles, (rows, tiles along K, blocks of a tile); those of padding are 0."""
    padding = (0, columns * blocks - scales.shape[1], 0, rows * TILE_ROWS - scales.shape[0])
    whole: torch.Tensor = torch.nn.functional.pad(scales, padding).unflatten(1, (columns, blocks))
    return whole


def _scale_order(scales: torch.Tensor, decoded: bool) -> torch.Tensor:
    """A view of scales (64 R, C, blocks) in the order of tiles."""
    split: torch.Tensor
    split = scales.unflatten(0, (-1, GROUPS, 2, 8)).unflatten(-1, (STEPS, -1))  # R, group, half, g, C, step, block
    split = split.permute((0, 4, 1, 3, 6, 5, 2) if decoded else (0, 4, 1, 3, 2, 5, 6))
    return split


def _split_nibbles(padded: torch.Tensor) -> torch.Tensor:
    """Byte i of each 32: code i in the low nibble, code 32 + i in the high one."""
    steps = padded.unflatten(1, (-1, 2, 16))
    first, second = steps[:, :, 0], steps[:, :, 1]
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 240)
    return torch.stack((even, odd), -1).flatten(1)


def _join_nibbles(split: torch.Tensor) -> torch.Tensor:
    """The inverse of `_split_nibbles`."""
    steps = split.unflatten(1, (-1, 16, 2))
    even, odd = steps[..., 0], steps[..., 1]
    return torch.stack(((even & 15) | (odd << 4), (even >> 4) | (odd & 240)), 2).flatten(1)


def _recode(codes: torch.Tensor, scales: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and factors as decoders want them."""
    if fmt == NVFP4:
        factor = torch.full((scales.shape[0],), NV_FACTOR, device=scales.device)
        scales = _nv_table(scales.device)[scales.long()]
    else:
        largest = scales.masked_fill(scales == _E8M0_NAN, 0).amax(1, keepdim=True).int()
        # from the bits, in float64: torch would compute powers of two, in float32, where some are denormal
        factor = ((largest.view(-1).long() + _MX_FACTOR[fmt.element] + 1023) << 52).view(torch.float64).float()
        below = 254 - largest + scales.int()
        scales = torch.where(below >= 1, below, 0).to(torch.uint8)
    if fmt.element is Element.E2M1:
        codes = _spread(pad_to_tiles(codes))
    return codes, scales, factor


def _without_signs(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and e4m3 scales of the same values, scales positive and codes 0 where they are 0, as kernels expect."""
    negative, zero = scales >= 128, (scales & 127) == 0
    if not bool((negative | zero).any()):
        return codes, scales
    width = _block(NVFP4) // NVFP4.packed
    flip = torch.where(negative, 0x88, 0).to(torch.uint8).repeat_interleave(width, 1)
    return (codes ^ flip).masked_fill_(zero.repeat_interleave(width, 1), 0), scales & 127


def _restore(
    codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `_recode`."""
    if fmt.element is Element.E2M1:
        codes = _gather(codes)
    if fmt == NVFP4:
        table = _nv_table(torch.device("cpu")).long()
        inverse = torch.zeros(256, dtype=torch.uint8)
        inverse[table[1:127]] = torch.arange(1, 127, dtype=torch.uint8)
        return codes, inverse.to(scales.device)[scales.long()]
    largest = torch.frexp(factor.double()).exponent.view(-1, 1) - 1 - _MX_FACTOR[fmt.element]
    scales = (scales.int() - 254 + largest).clamp(0, 254).masked_fill(factor.isnan().view(-1, 1), _E8M0_NAN)
    return codes, scales.to(torch.uint8)


@cache
def _nv_table(device: torch.device) -> torch.Tensor:
    """The decoders' code of every e4m3 scale that is not negative; for 0 that of the smallest, for NaN that of 1."""
    bits = torch.arange(128, dtype=torch.uint8)
    value = bits.view(torch.float8_e4m3fn).double().nan_to_num(1.0).clamp(min=2.0**-9)
    mantissa, exponent = torch.frexp(value)  # mantissa in [0.5, 1)
    return (((exponent - 1 + 18) << 3) | (mantissa * 16 - 8).int()).to(torch.uint8).to(device)


@cache
def _spread_table(device: torch.device) -> torch.Tensor:
    """int32 (2, 65536): where four codes of a 16-bit word go that are the first or the last of eight."""
    four = torch.arange(65536, dtype=torch.int64)
    halves = []
    for base in (0, 2):
        word = torch.zeros_like(four)
        for i in range(4):
            code = (four >> (4 * i)) & 15
            pair, shift = base + i // 2, 16 * (i % 2)
            word |= ((code & 7) << (_MAGNITUDE[pair] + shift)) | ((code >> 3) << (_SIGN[pair] + shift))
        halves.append(word)
    return torch.stack(halves).to(torch.int32).to(device)


def _spread(codes: torch.Tensor) -> torch.Tensor:
    """Place the bits of each eight codes for the decoder."""
    table = _spread_table(codes.device)
    four = codes.view(torch.int16).unflatten(1, (-1, 2)).int() & 0xFFFF
    return (table[0][four[..., 0]] | table[1][four[..., 1]]).view(torch.uint8)


def _gather(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_spread`."""
    word = words.contiguous().view(torch.int32)
    plain = torch.zeros_like(word)
    for pair in range(4):
        for half in (0, 1):
            code = ((word >> (_MAGNITUDE[pair] + 16 * half)) & 7) | (((word >> (_SIGN[pair] + 16 * half)) & 1) << 3)
            plain |= code << (4 * (2 * pair + half))
    return plain.view(torch.uint8)
