"""Codes of elements and scales against their definitions, value by value."""

from __future__ import annotations

import math

import pytest
import torch
from b12x_core.formats import Element
from b12x_core.reference.codecs import decode_e2m1, decode_e8m0, encode_e2m1, encode_e8m0_up, encode_fp8


def e2m1(code: int) -> float:
    """A code's value from its bits: sign, two of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_decode_e2m1_low_nibble_is_even() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    expected = [[e2m1(byte & 15), e2m1(byte >> 4)] for byte in range(256)]
    assert torch.equal(decode_e2m1(packed).reshape(256, 2), torch.tensor(expected))


def test_encode_e2m1_keeps_every_value_and_the_sign_of_zero() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = torch.tensor([e2m1(code) for code in range(16)])
    packed = encode_e2m1(values)
    assert torch.equal(torch.stack((packed & 15, packed >> 4), 1).flatten(), codes)


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (0.25, 0.0),
        (0.2500001, 0.5),
        (0.75, 1.0),
        (0.7499999, 0.5),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (5.0000005, 6.0),
        (1e30, 6.0),
        (math.inf, 6.0),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_encode_e2m1_rounds_ties_to_even_and_saturates(value: float, nearest: float, sign: float) -> None:
    decoded = decode_e2m1(encode_e2m1(torch.tensor([sign * value, 0.0])))
    assert decoded[0].item() == sign * nearest


def test_fp8_saturates_and_keeps_nan() -> None:
    values = torch.tensor([1e9, -1e9, math.inf, 449.0, math.nan])
    e4m3 = encode_fp8(values, Element.E4M3).float()
    assert e4m3[:4].tolist() == [448.0, -448.0, 448.0, 448.0]
    assert e4m3[4].isnan()
    assert encode_fp8(values[:2], Element.E5M2).float().tolist() == [57344.0, -57344.0]


def test_e8m0_decodes_every_code() -> None:
    decoded = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert decoded[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert decoded[255].isnan()


@pytest.mark.parametrize(
    ("value", "power"),
    [
        (1.0, 1.0),
        (1.0000001, 2.0),
        (0.5, 0.5),
        (0.51, 1.0),
        (3.0, 4.0),
        (4.0, 4.0),
        (0.0, 2.0**-127),
        (1e-45, 2.0**-127),
    ],
)
def test_e8m0_rounds_up(value: float, power: float) -> None:
    assert decode_e8m0(encode_e8m0_up(torch.tensor([value]))).item() == power
