"""y = x W^T + b in plain torch."""

from __future__ import annotations

import torch

from b12x_core.formats import Scheme
from b12x_core.reference.quantize import as_activation, dequantize


def per_row(global_scale: torch.Tensor | None) -> torch.Tensor | None:
    """A global scale, one a matrix or one a row, shaped to multiply (..., rows, K)."""
    if global_scale is None or global_scale.numel() == 1:
        return global_scale
    return global_scale.float().unsqueeze(-1)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    scheme: Scheme,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """(M, K) bf16 or fp16 -> (M, N) of `out_dtype`, accumulated in float32. Arguments as in `prepare_linear`."""
    w = dequantize(weight, scheme.weight, scale, per_row(global_scale))
    y = as_activation(x, scheme.activation, input_scale) @ w.T
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)
