"""What a linear layer must return, in float64 from the bytes of its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from b12x_conformance.oracle.quantize import Quantized, dequantize, fake_quantize_activation

ACTIVATION_RULE: dict[str, str] = {
    "bf16": "none",
    "fp16": "none",
    "fp8-tensor": "fp8-tensor",
    "fp8-tensor-token": "fp8-token",
    "fp8-tensor-w8a16": "none",
    "fp8-channel": "fp8-token",
    "fp8-channel-tensor": "fp8-tensor",
    "fp8-channel-w8a16": "none",
    "fp8-block": "fp8-group",
    "fp8-block-w8a16": "none",
    "mxfp8": "mxfp8",
    "mxfp8-w8a16": "none",
    "nvfp4-w4a4": "nvfp4",
    "nvfp4-w4a8": "mxfp8",
    "nvfp4-w4a8-fp8": "fp8-token",
    "nvfp4-w4a16": "none",
    "mxfp4-w4a4": "mxfp4",
    "mxfp4-w4a8": "mxfp8",
    "mxfp4-w4a8-fp8": "fp8-token",
    "mxfp4-w4a16": "none",
}
"""The activation rule of each scheme, by the scheme's name."""


def weight_values(weight: Quantized | torch.Tensor) -> torch.Tensor:
    """A stored weight, quantized or not, as float64."""
    return (dequantize(weight) if isinstance(weight, Quantized) else weight.cpu()).double()


def linear(
    x: torch.Tensor,
    shards: Sequence[Quantized | torch.Tensor],
    rule: str,
    *,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x (M, K) by the shards of a fused layer, one below the other -> (M, sum of N) float64.

    Args:
        x: activations, bf16 or fp16.
        shards: weights (N, K), each with scales of its own.
        rule: what happens to x first, see `fake_quantize_activation`.
        input_scale: the static scale of that rule, one for all shards: they read the same x.
        bias: (sum of N,), added without rounding.
    """
    a = fake_quantize_activation(x, rule, input_scale).double()
    y = torch.cat([a @ weight_values(shard).T for shard in shards], dim=-1)
    return y if bias is None else y + bias.cpu().double()
