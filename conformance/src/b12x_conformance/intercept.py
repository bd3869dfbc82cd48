"""See, or change, what enters each linear layer and each expert of a transformers model.

Two users: calibration looks at the largest magnitudes, the truth puts the activation quantization of the checkpoint's
scheme there. Names are those of a checkpoint on disk, since that is what both have in hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

AtInput = Callable[[str, torch.Tensor], torch.Tensor]
"""(observed name, input) -> what the layer gets in its place."""

IMPLEMENTATION = "b12x_conformance_intercepted"
"""Name of the experts implementation below, to be passed to transformers as `experts_implementation`."""

_AT_INPUT = "b12x_at_input"


def in_transformers(module: str) -> str:
    """The name that transformers gives a module which a checkpoint, made for older code, names otherwise."""
    return re.sub(r"^backbone\.", "model.", module).replace(".block_sparse_moe.", ".mlp.")


def observed_name(module: str) -> str:
    """The name under which the input of a checkpoint's module is reported.

    transformers keeps all experts of a layer in one module, and gate and up projection have the same input; hence
    "<...>.experts.3.w1" and "<...>.experts.3.w3" are both reported as "<...>.experts.3.up".
    """
    module = in_transformers(module)
    match = re.fullmatch(r"(.*\.experts\.\d+)\.(\w+)", module)
    if match is None:
        return module
    return f"{match[1]}.{'down' if match[2] in ('w2', 'down_proj') else 'up'}"


def intercept(model: nn.Module, at_input: AtInput) -> None:
    """Call `at_input` at the input of every linear layer and every expert of `model`, from now on.

    The model must have been made with `experts_implementation=IMPLEMENTATION` if it has experts.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_hook(name, at_input))
        elif hasattr(module, "_apply_gate") or name.endswith(".experts"):
            setattr(module, _AT_INPUT, _of_expert(name, at_input))


def _hook(name: str, at_input: AtInput) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    return lambda _, inputs: (at_input(name, inputs[0]), *inputs[1:])


def _of_expert(name: str, at_input: AtInput) -> Callable[[int, str, torch.Tensor], torch.Tensor]:
    return lambda expert, which, x: at_input(f"{name}.{expert}.{which}", x)


def _experts_forward(
    experts: Any, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of one layer, one after another: x (M, H), routing (M, k) -> (M, H)."""
    at_input = getattr(experts, _AT_INPUT, lambda expert, which, x: x)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    result = torch.zeros_like(hidden)
    for expert in range(experts.num_experts):
        rows, slots = torch.where(topk_ids == expert)
        if rows.numel() == 0:
            continue
        # All rows are handed over, not only this expert's: what is done to them is then the same for every expert.
        x = _project(experts, first, expert, at_input(expert, "up", hidden)[rows])
        x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        x = _project(experts, "down_proj", expert, at_input(expert, "down", x))
        result.index_add_(0, rows, x * topk_weights[rows, slots, None].to(x.dtype))
    return result


def _project(experts: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    matrix = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return nn.functional.linear(x, matrix.T if experts.is_transposed else matrix, bias)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
