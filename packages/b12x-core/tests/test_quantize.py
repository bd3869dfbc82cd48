"""Activation rules: scales, rounding, edges of K, and the inputs that make others divide by zero."""

from __future__ import annotations

import pytest
import torch
from b12x_core import FP8_BLOCK, FP8_GROUP, FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, ArgumentError, Format, quantize
from b12x_core.reference.quantize import as_activation, dequantize_activation

DYNAMIC = [FP8_TENSOR, FP8_ROW, FP8_GROUP, MXFP8, MXFP4]
ONE = torch.ones(1)


@pytest.mark.parametrize("fmt", [*DYNAMIC, NVFP4], ids=str)
def test_error_is_at_most_half_a_step(fmt: Format) -> None:
    x = torch.randn(5, 160) * torch.logspace(-3, 3, 5).unsqueeze(1)
    amax = x.abs().amax() if fmt in (FP8_TENSOR, NVFP4) else x.abs().amax(1, keepdim=True)
    error = (as_activation(x, fmt, (amax / 2688).reshape(1) if fmt == NVFP4 else None) - x).abs()
    # Half a step is 2^-4 of a value in e4m3 and 1/4 in e2m1 (its coarsest), of scales at most doubled by rounding up.
    relative = 0.25 if fmt in (MXFP4, NVFP4) else 2.0**-4
    floor = amax * (0.5 / 6 if fmt in (MXFP4, NVFP4) else 2.0**-10 / 448 * 2)
    assert (error <= relative * x.abs() * 1.04 + floor).all()


@pytest.mark.parametrize("fmt", DYNAMIC, ids=str)
def test_all_zero_rows_give_zero(fmt: Format) -> None:
    x = torch.zeros(3, 128)
    x[1] = 1.0
    y = dequantize_activation(quantize(x, fmt))
    assert torch.equal(y, x)


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e38])
@pytest.mark.parametrize("fmt", [FP8_TENSOR, NVFP4], ids=str)
def test_degenerate_static_scales_stay_finite(fmt: Format, scale: float) -> None:
    for x in (torch.zeros(2, 32), torch.randn(2, 32)):
        y = dequantize_activation(quantize(x, fmt, scale=torch.tensor([scale])))
        assert y.isfinite().all()
    assert not dequantize_activation(quantize(torch.zeros(2, 32), fmt, scale=torch.tensor([scale]))).any()


def test_static_fp8_saturates() -> None:
    q = quantize(torch.tensor([[1000.0, -1000.0, 100.0]]), FP8_TENSOR, scale=ONE)
    assert q.data.float().tolist() == [[448.0, -448.0, 96.0]]  # 100 lies between 96 and 104, and 96 is even


def test_mx_scales_are_powers_of_two_rounded_up() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 32] = 448.0, 449.0
    assert quantize(x, MXFP8).scale.float().tolist() == [[1.0, 2.0]]
    x[0, 0], x[0, 32] = 6.0, 6.5
    assert quantize(x, MXFP4).scale.float().tolist() == [[1.0, 2.0]]


def test_nvfp4_block_scale_is_relative_to_the_global_scale() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 6.0, 3.0
    q = quantize(x, NVFP4, scale=torch.tensor([0.25]))
    assert q.scale.float().tolist() == [[4.0, 2.0]]
    assert torch.equal(dequantize_activation(q), x)


def test_edge_group_of_k() -> None:
    x = torch.ones(2, 130)
    x[:, 128:] = 100.0
    q = quantize(x, FP8_GROUP)
    assert q.scale.shape == (2, 2)
    assert torch.allclose(q.scale[:, 1], torch.tensor(100 / 448))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.zeros(2, 33), MXFP8, None), r"a multiple of 32 for mxfp8; got float32 \(2, 33\)"),
        ((torch.zeros(2, 32), NVFP4, None), r"scale must be a tensor of float32 with one value; got None"),
        ((torch.zeros(2, 32), MXFP8, ONE), r"scale must be None for mxfp8"),
        ((torch.zeros(2, 32), FP8_BLOCK, None), r"fmt must be one of .*; got fp8-block"),
        ((torch.zeros(2, 32, dtype=torch.int32), MXFP8, None), r"x must be a tensor of bfloat16 or float16 or float32"),
        ((torch.zeros(2, 32), FP8_TENSOR, torch.ones(2)), r"one value; got float32 \(2,\)"),
    ],
)
def test_bad_input_gets_a_sentence(arguments: tuple[torch.Tensor, Format, torch.Tensor | None], sentence: str) -> None:
    x, fmt, scale = arguments
    with pytest.raises(ArgumentError, match=sentence):
        quantize(x, fmt, scale=scale)
