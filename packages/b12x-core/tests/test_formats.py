"""Formats and schemes as values."""

from __future__ import annotations

import pytest
from b12x_core import (
    BF16,
    FP8_BLOCK,
    FP8_ROW,
    FP8_TENSOR,
    FP16,
    MXFP4,
    NVFP4,
    SCHEMES,
    Activation,
    ArgumentError,
    Scheme,
    serving_scheme,
)


def test_schemes_parse_to_themselves() -> None:
    for name, scheme in SCHEMES.items():
        assert Scheme.parse(name) == scheme
        assert str(scheme) == name
        assert Scheme(scheme.weight, scheme.activation) == scheme


def test_fp16_activations_are_16_bit_activations() -> None:
    assert str(Scheme(weight=NVFP4, activation=FP16)) == "nvfp4-w4a16"
    assert Scheme(NVFP4, FP16) == Scheme(NVFP4, BF16)


def test_unknown_schemes_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"got 'nvfp5'"):
        Scheme.parse("nvfp5")
    with pytest.raises(ArgumentError, match=r"weight bf16 with activation nvfp4"):
        Scheme(BF16, NVFP4)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [(FP8_TENSOR, (1,)), (FP8_ROW, (160,)), (FP8_BLOCK, (2, 5)), (NVFP4, (160, 36)), (MXFP4, (160, 18)), (BF16, ())],
)
def test_scale_shapes(fmt: object, shape: tuple[int, ...]) -> None:
    assert fmt.scale_shape(160, 576) == shape  # type: ignore[attr-defined]


def test_bytes_of_a_matrix() -> None:
    assert NVFP4.nbytes(128, 64) == 128 * 32 + 128 * 4
    assert FP8_BLOCK.nbytes(129, 129) == 129 * 129 + 4 * 4
    assert BF16.nbytes(3, 5) == 30


def test_force_a16_changes_the_scheme_only_when_asked(no_environment: pytest.MonkeyPatch) -> None:
    w4a4 = Scheme.parse("nvfp4-w4a4")
    assert serving_scheme(w4a4) == w4a4
    no_environment.setenv("B12X_FORCE_A16", "1")
    assert serving_scheme(w4a4) == Scheme.parse("nvfp4-w4a16")
    assert serving_scheme(Scheme.parse("fp8-block")) == Scheme.parse("fp8-block-w8a16")
    assert serving_scheme(Scheme.parse("bf16")) == Scheme.parse("bf16")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"function": "tanh"}, "function must be one of"),
        ({"function": "swiglu", "gated": False}, "gated experts only"),
        ({"function": "silu", "alpha": 1.7}, "belong to swiglu"),
        ({"function": "relu2", "gated": False, "limit": 7.0}, "of a gated function"),
        ({"function": "silu", "limit": 0.0}, "positive and finite"),
    ],
)
def test_activations_that_no_model_defines(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        Activation(**arguments)  # type: ignore[arg-type]
