"""The layout of weights in tiles, against the fragments of the PTX ISA written out element by element."""

from __future__ import annotations

import pytest
import torch
from b12x_core.ops.packing import pack_weight, unpack_weight


def element(word_of_lane: int, lane: int, position: int, bits: int) -> tuple[int, int]:
    """(row, k) of an element of the A fragment, from the formulas of the PTX ISA for m16n8k16 and m16n8k32."""
    group, thread = lane // 4, lane % 4
    per_word = 32 // bits
    row = group + 8 * (word_of_lane % 2)
    k = thread * per_word + position + (16 if bits == 8 else 8) * (word_of_lane // 2)
    return row, k


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float8_e4m3fn, 8)])
def test_a_tile_holds_fragments(dtype: torch.dtype, bits: int) -> None:
    count = 64 * 8 // bits
    integers = torch.int16 if bits == 16 else torch.uint8
    codes = torch.randint(0, 2 ** (bits - 1), (64, count), dtype=integers)
    tile = pack_weight(codes.view(dtype)).view(integers).view(4, 2, 32, 4, -1)
    for group in range(4):
        for step in range(2):
            for lane in range(32):
                for word in range(4):
                    for position in range(32 // bits):
                        row, k = element(word, lane, position, bits)
                        want = codes[16 * group + row, step * (256 // bits) + k]
                        assert tile[group, step, lane, word, position] == want


def test_a_widened_tile_holds_the_fragments_of_16_bit_operands() -> None:
    codes = torch.randint(0, 128, (64, 64), dtype=torch.uint8)
    tile = pack_weight(codes.view(torch.float8_e4m3fn), widened=True).view(4, 2, 32, 4, 4)
    for group in range(4):
        for step in range(2):
            for lane in range(32):
                for word in range(4):
                    for position in range(4):
                        # word 0 and 1 feed the first instruction of 16 k, words 2 and 3 the second; bytes 0 and 1 are
                        # the register of k below 8, bytes 2 and 3 that of the others
                        row, k = element(word % 2 + 2 * (position // 2), lane, position % 2, 16)
                        want = codes[16 * group + row, 32 * step + 16 * (word // 2) + k]
                        assert tile[group, step, lane, word, position] == want


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 64), (65, 63), (160, 576), (200, 130)])
def test_unpacking_gives_the_weight_back_and_padding_is_zero(n: int, k: int, widened: bool) -> None:
    weight = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    packed = pack_weight(weight.view(torch.float8_e4m3fn), widened=widened)
    assert packed.shape == (-(-n // 64), -(-k // 64), 4096)
    assert torch.equal(unpack_weight(packed, n, k, torch.uint8, widened=widened), weight)
    whole = unpack_weight(packed, 64 * packed.shape[0], 64 * packed.shape[1], torch.uint8, widened=widened)
    assert not whole[n:].any()
    assert not whole[:, k:].any()


def test_any_strides() -> None:
    weight = torch.randn(48, 96).bfloat16()
    assert torch.equal(pack_weight(weight.T.contiguous().T), pack_weight(weight))
