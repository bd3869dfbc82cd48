"""Mixture of experts in plain torch: every chosen expert in turn, rows gathered, results added in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from b12x_core.activations import Activation
from b12x_core.formats import ALL, FP8_BLOCK, Scheme
from b12x_core.reference.linear import per_row
from b12x_core.reference.quantize import as_activation, dequantize


@dataclass(frozen=True)
class ExpertMatrix:
    """One of the two stacked weights of E experts, with everything that belongs to it; see `prepare_experts`.

    Attributes:
        parts: equal runs of rows whose block scales each start anew: 2 where gate and up rows lie one over the other.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    parts: int = 1

    def product(self, expert: int, a: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """A (rows, K) float32, as the GEMM sees it, times the expert's weight, plus its bias -> float32."""
        weight, scale = self.weight[expert], None if self.scale is None else self.scale[expert]
        if scheme.weight == FP8_BLOCK and scale is not None:
            each = (part.unflatten(0, (self.parts, -1)) for part in (weight, scale))
            w = dequantize(next(each), scheme.weight, next(each)).flatten(0, 1)
        else:
            global_scale = None if self.global_scale is None else self.global_scale[expert]
            w = dequantize(weight, scheme.weight, scale, per_row(global_scale))
        y = a @ w.T
        return y if self.bias is None else y + self.bias[expert].float()

    def static_scale(self, expert: int) -> torch.Tensor | None:
        """The activation's static scale for that expert."""
        if self.input_scale is None or self.input_scale.numel() == 1:
            return self.input_scale
        return self.input_scale[expert]


def _function(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "silu":
        return functional.silu(x)
    if name == "gelu":
        return functional.gelu(x)
    if name == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    assert name == "relu2", name
    return functional.relu(x).square()


def activate(h: torch.Tensor, activation: Activation, interleaved: bool) -> torch.Tensor:
    """(rows, 2I or I) float32 -> (rows, I) float32. Definitions: `b12x_core.activations`."""
    if not activation.gated:
        return _function(activation.function, h)
    gate, up = (h[:, 0::2], h[:, 1::2]) if interleaved else h.chunk(2, dim=1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.function == "swiglu":
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
    return _function(activation.function, gate) * up


def _dynamic_tensor_scale(scheme: Scheme, matrix: ExpertMatrix) -> bool:
    """Whether one scale, found at run time, spans the activation: then experts cannot be quantized one by one."""
    return scheme.activation.block == (ALL, ALL) and matrix.input_scale is None


def fused_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    expert_map: torch.Tensor | None,
    scheme: Scheme,
    activation: Activation,
    interleaved: bool,
    router_weight_on_input: bool,
    routed_scaling: float,
) -> torch.Tensor:
    """(M, H) -> (M, H) in x.dtype. Arguments as in `b12x_core.fused_moe`.

    A dynamic fp8-tensor activation scale spans x for the first GEMM and all routes of all experts for the second.
    """
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)
    values = x.float()
    if not router_weight_on_input and _dynamic_tensor_scale(scheme, w13):
        values = as_activation(x, scheme.activation)
    routes = []
    for expert in ids[ids >= 0].unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        weight = topk_weights[token, slot].float().unsqueeze(1)
        a = values[token]
        if router_weight_on_input:
            a = (a * weight).to(x.dtype).float()
        if router_weight_on_input or not _dynamic_tensor_scale(scheme, w13):
            a = as_activation(a, scheme.activation, w13.static_scale(expert))
        h = activate(w13.product(expert, a, scheme), activation, interleaved)
        routes.append((expert, token, weight, h))
    if routes and _dynamic_tensor_scale(scheme, w2):
        whole = as_activation(torch.cat([h for *_, h in routes]), scheme.activation)
        parts = whole.split([h.shape[0] for *_, h in routes])
    else:
        parts = tuple(as_activation(h, scheme.activation, w2.static_scale(expert)) for expert, *_, h in routes)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for (expert, token, weight, _), h in zip(routes, parts, strict=True):
        out = w2.product(expert, h, scheme)
        y.index_add_(0, token, out if router_weight_on_input else out * weight)
    return (y * routed_scaling).to(x.dtype)
