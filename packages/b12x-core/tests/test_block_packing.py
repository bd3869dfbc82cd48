"""Tiles of codes and scales: where each lands, element by element, and what decoders make of them."""

from __future__ import annotations

import pytest
import torch
from b12x_core.formats import MXFP4, MXFP8, NVFP4, Format
from b12x_core.ops.block_packing import CODE_BYTES, pack_blocks, unpack_blocks
from b12x_core.ops.packing import pack_weight
from b12x_core.reference.quantize import dequantize

SHAPES = [(64, 128), (17, 160), (70, 576), (1, 64), (130, 2880)]
LAYOUTS = [
    (MXFP8, False, False),
    (MXFP4, False, False),
    (MXFP4, False, True),
    (NVFP4, False, False),
    (MXFP8, True, False),
    (MXFP4, True, False),
    (NVFP4, True, False),
]


def stored(fmt: Format, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, all of them finite, and scales: e4m3 of every kind but 0, or e8m0 in the middle of their range."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // fmt.packed), generator=generator, dtype=torch.uint8)
    if fmt == MXFP8:
        codes = codes.masked_fill((codes & 127) == 127, 0)
    assert fmt.block is not None
    low, high = (1, 127) if fmt == NVFP4 else (100, 150)
    return codes, torch.randint(low, high, (n, k // fmt.block[1]), generator=generator, dtype=torch.uint8)


def nibble(codes: torch.Tensor, row: int, k: int) -> int:
    """A code of e2m1; 0 beyond the matrix."""
    if row >= codes.shape[0] or k >= 2 * codes.shape[1]:
        return 0
    return int(codes[row, k // 2]) >> (4 * (k % 2)) & 15


def half_word(word: int, pair: int, high: int) -> int:
    """The code of a pair, out of a word for the decoder: as the documented bits have it."""
    half = word >> (16 * high) & 0xFFFF
    magnitude = half >> (6, 3, 0, 13)[pair] & 7
    return magnitude | (half >> (11, 12, 9, 10)[pair] & 1) << 3


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4])
def test_decoded_codes_lie_where_the_lanes_look(fmt: Format) -> None:
    codes, scale = stored(fmt, 70, 192)
    packed, _ = pack_blocks(codes, scale, fmt, decoded=True)
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).view(2, 2, 4, 2, 32, 4)
    for at in torch.randint(0, words.numel(), (3000,), generator=torch.Generator().manual_seed(1)).tolist():
        tile_row, tile, group, step, lane, word = (int(i) for i in torch.unravel_index(torch.tensor(at), words.shape))
        g, t = lane // 4, lane % 4
        row = 64 * tile_row + 16 * group + g + 8 * (word % 2)
        for pair in range(4):
            for high in (0, 1):
                k = 128 * tile + 64 * step + 16 * t + 8 * (word // 2) + 2 * pair + high
                found = half_word(int(words[tile_row, tile, group, step, lane, word]), pair, high)
                assert found == nibble(codes, row, k), (row, k)


def test_nibbles_beside_e4m3_are_those_of_two_instructions() -> None:
    codes, scale = stored(MXFP4, 64, 128)
    packed, _ = pack_blocks(codes, scale, MXFP4, decoded=False, split_nibbles=True)
    tile = packed[0, 0, :CODE_BYTES].view(4, 2, 32, 4, 4)
    for group in range(4):
        for step in range(2):
            for lane in range(32):
                for word in range(4):
                    for byte in range(4):
                        row = 16 * group + lane // 4 + 8 * (word % 2)
                        k = 64 * step + 4 * (lane % 4) + byte + 16 * (word // 2)
                        found = int(tile[group, step, lane, word, byte])
                        assert found & 15 == nibble(codes, row, k)
                        assert found >> 4 == nibble(codes, row, k + 32)


@pytest.mark.parametrize("fmt", [MXFP8, MXFP4, NVFP4])
def test_native_codes_and_scales_lie_where_the_instruction_wants_them(fmt: Format) -> None:
    codes, scale = stored(fmt, 130, 320)
    packed, factor = pack_blocks(codes, scale, fmt, decoded=False)
    assert torch.equal(packed[..., :CODE_BYTES], pack_weight(codes))
    assert torch.equal(factor, torch.ones(130))
    blocks = packed.shape[2] // 64 - 64  # of a row, in a tile
    found = packed[..., CODE_BYTES:].view(3, -1, 4, 8, 2, 2, blocks // 2)
    for at in range(found.numel()):
        r, c, group, g, half, step, block = (int(i) for i in torch.unravel_index(torch.tensor(at), found.shape))
        row, column = 64 * r + 16 * group + g + 8 * half, blocks * c + blocks // 2 * step + block
        inside = row < 130 and column < scale.shape[1]
        assert int(found[r, c, group, g, half, step, block]) == (int(scale[row, column]) if inside else 0)


@pytest.mark.parametrize("fmt", [MXFP8, MXFP4, NVFP4])
def test_decoded_scales_lie_where_the_lanes_look(fmt: Format) -> None:
    _, scale = stored(fmt, 64, 256)
    codes = torch.full((64, 256 // fmt.packed), 0x22, dtype=torch.uint8)
    packed, _ = pack_blocks(codes, scale, fmt, decoded=True)
    blocks = packed.shape[2] // 64 - 64
    found = packed[..., CODE_BYTES:].view(-1, 4, 8, blocks // 2, 2, 2)  # tile, group, g, block of the step, step, half
    for c in range(found.shape[0]):
        for row in range(64):
            for step in (0, 1):
                for block in range(blocks // 2):
                    stored_scale = scale[row, c * blocks + step * (blocks // 2) + block]
                    code = int(found[c, row // 16, row % 8, block, step, row // 8 % 2])
                    if fmt == NVFP4:
                        value = 2.0 ** ((code >> 3) - 18) * (1 + (code & 7) / 8)
                        assert value == stored_scale.view(torch.float8_e4m3fn).item()
                    else:
                        assert code == 254 - int(scale[row].max()) + int(stored_scale)


@pytest.mark.parametrize(("fmt", "decoded", "split_nibbles"), LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpacking_gives_back_what_was_packed(fmt: Format, decoded: bool, split_nibbles: bool, n: int, k: int) -> None:
    codes, scale = stored(fmt, n, k)
    packed, factor = pack_blocks(codes, scale, fmt, decoded=decoded, split_nibbles=split_nibbles)
    again = unpack_blocks(packed, factor, n, k, fmt, decoded=decoded, split_nibbles=split_nibbles)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scale)


def test_rows_are_packed_a_part_at_a_time_and_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = stored(NVFP4, 300, 256)
    whole = pack_blocks(codes, scale, NVFP4, decoded=True)
    monkeypatch.setattr("b12x_core.ops.block_packing._CHUNK_BYTES", 1)
    parts = pack_blocks(codes, scale, NVFP4, decoded=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def half_float(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits of 16-bit numbers in int32 -> float64, denormals included."""
    return bits.to(torch.int16).view(dtype).double()


def decode(packed: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """What a decoder makes of tiles (1, C, bytes) of e2m1: (64, 128 C) products in `dtype`, by the documented bits."""
    bf16 = dtype == torch.bfloat16
    words = packed[0, :, :CODE_BYTES].contiguous().view(torch.int32).view(-1, 4, 2, 8, 4, 2, 2)
    blocks = packed.shape[2] // 64 - 64
    codes = packed[0, :, CODE_BYTES:].int().view(-1, 4, 8, blocks // 2, 2, 2)
    if fmt == NVFP4:
        scale_bits = 0x7000 | (codes << 4) if bf16 else codes << 7
    else:
        scale_bits = codes << 7 if bf16 else (codes - 224).clamp(min=0) << 10
    scales = half_float(scale_bits, dtype)
    out = torch.zeros((64, 128 * packed.shape[1]), dtype=torch.float64)
    mask, move = (0x01C0, 0) if bf16 else (0x0E00, 3)
    for pair in range(4):
        for high in (0, 1):
            half = (words >> (16 * high)) & 0xFFFF
            magnitude = (half >> (6, 3, 0, 13)[pair] & 7) << (6 + move)
            sign = (half >> (11, 12, 9, 10)[pair] & 1) << 15
            assert mask == 7 << (6 + move)
            value = half_float(magnitude | sign, dtype)  # tile, group, step, g, t, word, half
            for t in range(4):
                of_step = scales[:, :, :, t * (blocks // 2) // 4].permute(0, 1, 3, 2, 4)  # tile, group, step, g, half
                for word in (0, 1):
                    product = value[:, :, :, :, t, word] * of_step
                    assert torch.equal(product, product.to(dtype).double()), "the product is not exact"
                    for step in (0, 1):
                        k = 64 * step + 16 * t + 8 * word + 2 * pair + high
                        rows = product[:, :, step].permute(1, 3, 2, 0).reshape(64, -1)  # group, half, g, tile
                        out[:, k::128] = rows
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4])
def test_decoded_products_are_exact(fmt: Format, dtype: torch.dtype) -> None:
    """Every code with every positive e4m3 scale; e8m0 scales 24 octaves below the largest of their row."""
    assert fmt.block is not None
    block = fmt.block[1]
    count = 126 if fmt == NVFP4 else 25
    k = 128 * -(-count * block // 128)
    codes = torch.arange(16, dtype=torch.uint8).repeat(k // 16).repeat(64, 1)
    for row in range(64):
        codes[row] = codes[row].roll(row)
    scale = torch.ones((64, k // block), dtype=torch.uint8)
    scale[:, :count] = torch.arange(1, count + 1, dtype=torch.uint8)
    if fmt == MXFP4:
        scale[:, :count] += torch.arange(64, dtype=torch.uint8).view(-1, 1) * 3  # another largest scale in each row
        scale[:, count:] = scale[:, :1]
    nibbles = codes[:, 0::2] | (codes[:, 1::2] << 4)
    packed, factor = pack_blocks(nibbles, scale, fmt, decoded=True)
    expected = dequantize(nibbles, fmt, scale.view(torch.float8_e4m3fn) if fmt == NVFP4 else scale).double()
    assert torch.equal(decode(packed, fmt, dtype) * factor.double().view(-1, 1), expected)


def test_scales_that_are_zero_negative_or_no_numbers() -> None:
    codes, scale = stored(NVFP4, 64, 128)
    scale[3, 2] = 0
    scale[4, 1] |= 128
    scale[5, 0] = 127
    packed, factor = pack_blocks(codes, scale, NVFP4, decoded=True)
    found = decode(packed, NVFP4, torch.bfloat16) * factor.double().view(-1, 1)
    expected = dequantize(codes, NVFP4, scale.view(torch.float8_e4m3fn)).double()
    assert found[5].isnan().all()
    rest = torch.arange(64) != 5
    assert torch.equal(found[rest], expected[rest])
    codes, scale = stored(MXFP4, 64, 128)
    scale[7, 1] = 255
    _, factor = pack_blocks(codes, scale, MXFP4, decoded=True)
    assert factor.isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(("fmt", "decoded", "split_nibbles"), LAYOUTS)
def test_a_scale_that_is_no_number_makes_its_row_so(fmt: Format, decoded: bool, split_nibbles: bool) -> None:
    codes, scale = stored(fmt, 5, 96)
    scale[1, 2] = 127 if fmt == NVFP4 else 255
    packed, factor = pack_blocks(codes, scale, fmt, decoded=decoded, split_nibbles=split_nibbles)
    assert factor.isnan().tolist() == [False, True, False, False, False]
    _, again = unpack_blocks(packed, factor, 5, 96, fmt, decoded=decoded, split_nibbles=split_nibbles)
    rest = torch.arange(5) != 1
    assert torch.equal(again[rest], scale[rest])


@pytest.mark.parametrize("decoded", [False, True])
def test_signs_of_scales_go_to_the_codes(decoded: bool) -> None:
    """The block-scaled instruction knows no sign of a scale, and the decoder none either."""
    codes, scale = stored(NVFP4, 2, 64)
    scale[0] = torch.tensor([128 | 56, 0, 128, 1], dtype=torch.uint8)
    packed, factor = pack_blocks(codes, scale, NVFP4, decoded=decoded)
    again, scales = unpack_blocks(packed, factor, 2, 64, NVFP4, decoded=decoded)
    before, after = (dequantize(c, NVFP4, s.view(torch.float8_e4m3fn)) for c, s in ((codes, scale), (again, scales)))
    assert torch.equal(before, after)
    assert not (scales & 128).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", [30, 127, 254])
def test_decoded_products_of_mxfp8_are_exact(largest: int, dtype: torch.dtype) -> None:
    """Every finite code as its bits stand, beside scales 22 (fp16) or 126 (bf16) octaves below the largest."""
    reach = 22 if dtype == torch.float16 else min(126, largest)
    codes = torch.arange(256, dtype=torch.uint8).masked_fill_(torch.arange(256) % 128 == 127, 0)
    codes = torch.stack([codes.roll(64 * i) for i in range(8)]).repeat_interleave(2, 0)
    scale = torch.randint(largest - reach, largest + 1, (16, 8), dtype=torch.uint8)
    scale[:, 2], scale[:, 5] = largest, largest - reach
    _, factor = pack_blocks(codes, scale, MXFP8, decoded=True)
    shift = 4 if dtype == torch.bfloat16 else 1
    value = half_float(((codes.int() & 128) << 8) | ((codes.int() & 127) << 8 >> shift), dtype)
    byte = 254 - largest + scale.int()
    bits = byte << 7 if dtype == torch.bfloat16 else (byte - 224).clamp(min=0) << 10
    product = value * half_float(bits, dtype).repeat_interleave(32, 1)
    assert torch.equal(product, product.to(dtype).double())
    power = 2.0 ** (scale.double() - 127).repeat_interleave(32, 1)
    expected = codes.view(torch.float8_e4m3fn).double() * power
    assert torch.equal(product * factor.double().view(-1, 1), expected)
