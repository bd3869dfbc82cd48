"""What the core's tests share."""

from __future__ import annotations

import pytest
import torch
from b12x_core import FP8_BLOCK, NVFP4, LinearWeights, Scheme, prepare_linear, quantize
from b12x_core.capabilities import Op, Tier, support_table
from b12x_core.reference.quantize import dequantize


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20260101)


@pytest.fixture
def bytewise_allclose(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.library.opcheck` compares arguments before and after with allclose, which lacks 8-bit floats."""
    original = torch.allclose

    def allclose(a: torch.Tensor, b: torch.Tensor, **tolerances: bool) -> bool:
        if a.dtype.itemsize == 1:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return original(a, b, **tolerances)

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("B12X_REFERENCE", "B12X_FORCE_A16", "B12X_STATS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


Stored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]


def stored_weight(scheme: Scheme, w: torch.Tensor) -> Stored:
    """(N, K) float32 -> the stored weight, its scales, its global scale, and what it stands for in float32."""
    fmt = scheme.weight
    if not fmt.quantized:
        stored = w.to(torch.float16 if fmt.name == "fp16" else torch.bfloat16)
        return stored, None, None, stored.float()
    if fmt == FP8_BLOCK:
        rows, k = w.shape
        padded = torch.nn.functional.pad(w, (0, -k % 128, 0, -rows % 128))
        scale = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
        each = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
        data = (w / each).to(torch.float8_e4m3fn)
        return data, scale, None, dequantize(data, fmt, scale)
    global_scale = (w.abs().amax() / (448 * 6)).reshape(1) if fmt == NVFP4 else None
    q = quantize(w, fmt, scale=global_scale)
    return q.data, q.scale, global_scale, dequantize(q.data, fmt, q.scale, global_scale)


def input_scale_for(scheme: Scheme, x: torch.Tensor) -> torch.Tensor | None:
    """The static activation scale of a scheme that requires one."""
    return (x.float().abs().amax() / (448 * 6)).reshape(1) if scheme.static_activation_scale else None


def supports_linear_on_tiles(name: str) -> bool:
    """Whether a kernel serves the scheme, so that its weights are laid out in tiles."""
    return any(row.op is Op.LINEAR and row.scheme == name and row.kernels[Tier.PORTABLE] for row in support_table())


def activation_dtype(scheme: Scheme) -> torch.dtype:
    return torch.float16 if scheme.name == "fp16" else torch.bfloat16


def make_linear(scheme: Scheme, n: int, k: int, x: torch.Tensor) -> tuple[LinearWeights, torch.Tensor]:
    """Random prepared weights, and the float32 weight that they stand for."""
    data, scale, global_scale, dense = stored_weight(scheme, torch.randn(n, k) * 0.05)
    weights = prepare_linear(
        scheme, data, scale, global_scale=global_scale, input_scale=input_scale_for(scheme, x), bias=torch.randn(n)
    )
    return weights, dense
