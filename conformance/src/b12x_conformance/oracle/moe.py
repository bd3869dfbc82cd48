"""What a mixture of experts must return, in float64: one token and one route at a time, as the definition reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from b12x_core.activations import Activation

from b12x_conformance.oracle.linear import weight_values
from b12x_conformance.oracle.quantize import Quantized, fake_quantize_activation


@dataclass(frozen=True)
class Expert:
    """One expert as a checkpoint stores it.

    Attributes:
        gate: (I, H) or None where the activation is not gated.
        up, down: (I, H) and (H, I).
        input_scale: static activation scale of gate and up. down_input_scale: that of down.
        gate_bias, up_bias, down_bias: (I,), (I,), (H,), or None.
    """

    gate: Quantized | torch.Tensor | None
    up: Quantized | torch.Tensor
    down: Quantized | torch.Tensor
    input_scale: torch.Tensor | None = None
    down_input_scale: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def activate(gate: torch.Tensor | None, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation between the GEMMs on float64, from the definitions in `b12x_core.activations`."""
    if gate is None:
        return _function(activation.function, up)
    if activation.limit is not None:
        gate = gate.minimum(torch.tensor(activation.limit, dtype=gate.dtype))
        up = up.clamp(-activation.limit, activation.limit)
    if activation.function == "swiglu":
        return gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.beta)
    return _function(activation.function, gate) * up


def _function(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "relu2":
        return torch.where(x > 0, x * x, torch.zeros_like(x))
    raise ValueError(f"activation: no definition of {name!r}")


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: Sequence[Expert],
    activation: Activation,
    rule: str,
    *,
    local: range | None = None,
    router_weight_on_input: bool = False,
) -> torch.Tensor:
    """Send x (M, H) through its experts -> (M, H) float64.

    Args:
        topk_weights: (M, k) routed weights.
        topk_ids: (M, k) global expert ids; -1 is no expert.
        experts: all experts of the layer.
        rule: activation rule of both GEMMs; the intermediate is quantized again between them.
        local: experts of this rank; routes to others contribute nothing. None: all.
        router_weight_on_input: the routed weight multiplies x, rounded to x's dtype, instead of the output.

    A dynamic "fp8-tensor" rule has one scale for x and one for the intermediates of all routes; every other rule acts
    on a route by itself.
    """
    x, weights, ids = x.cpu(), topk_weights.cpu().double(), topk_ids.cpu().long()
    whole = rule == "fp8-tensor"
    a_whole = fake_quantize_activation(x, rule) if whole and experts[0].input_scale is None else None
    if a_whole is not None and router_weight_on_input:
        raise ValueError("a dynamic scale of the whole input with weights on it is not defined by any engine")
    present = [e for e in (range(len(experts)) if local is None else local) if bool((ids == e).any())]
    routes = []
    for number in present:
        expert = experts[number]
        token, slot = (ids == number).nonzero(as_tuple=True)
        weight = weights[token, slot, None]
        if a_whole is not None:
            a = a_whole[token].double()
        else:
            rows = (x[token].double() * weight).to(x.dtype) if router_weight_on_input else x[token]
            a = fake_quantize_activation(rows, rule, expert.input_scale).double()
        up = _product(a, expert.up, expert.up_bias)
        gate = None if expert.gate is None else _product(a, expert.gate, expert.gate_bias)
        routes.append((expert, token, weight, activate(gate, up, activation)))
    shared = None
    if whole and routes and routes[0][0].down_input_scale is None:
        # Every quantity of the definition is fp32, hence the scale too.
        shared = torch.cat([h for *_, h in routes]).abs().max().float() / 448
    y = torch.zeros(x.shape, dtype=torch.float64)
    for expert, token, weight, h in routes:
        scale = expert.down_input_scale if shared is None else shared
        out = _product(fake_quantize_activation(h.float(), rule, scale).double(), expert.down, expert.down_bias)
        y.index_add_(0, token, out if router_weight_on_input else out * weight)
    return y


def _product(a: torch.Tensor, weight: Quantized | torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = a @ weight_values(weight).T
    return y if bias is None else y + bias.cpu().double()
