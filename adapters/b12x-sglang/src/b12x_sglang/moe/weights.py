"""The parameters of a loaded `FusedMoE` layer, as the prepared weights that the op reads."""

from __future__ import annotations

from typing import Any, Literal

import b12x_core
import torch
from b12x_core import ExpertWeights, Scheme

_WEIGHT = ("weight", "weight_packed")
_SCALE = ("weight_scale", "weight_scale_inv")
_GLOBAL_SCALE = ("weight_scale_2", "weight_global_scale")
_INPUT_SCALE = ("input_scale", "input_global_scale")
"""What SGLang's methods call a tensor, after "w13_" or "w2_"."""

MATRICES = ("w13", "w2")


def parameter(layer: Any, matrix: str, names: tuple[str, ...]) -> torch.Tensor | None:
    """The parameter of the layer that has one of these names, None if it has none."""
    found = (getattr(layer, f"{matrix}_{name}", None) for name in names)
    return next((tensor for tensor in found if tensor is not None), None)


def weight_parameters(layer: Any, matrix: str) -> list[torch.nn.Parameter]:
    """The parameters that hold a matrix of the experts: one, unless two names stand for the same storage."""
    found = (getattr(layer, f"{matrix}_{name}", None) for name in _WEIGHT)
    return [tensor for tensor in found if tensor is not None]


def complete(layer: Any) -> None:
    """Add what loaders look for and take away what nobody reads, in a layer whose parameters were just created."""
    # SGLang's method for MXFP4 experts knows gpt-oss's names. Some models rename the tensors of a compressed-tensors
    # checkpoint to these, others pass over a name without a parameter: so there is one for either name.
    packed = layer.quant_config is not None and layer.quant_config.get_name() == "compressed_tensors"
    for matrix in MATRICES:
        weight = getattr(layer, f"{matrix}_weight", None)
        if packed and weight is not None and weight.dtype == torch.uint8:
            alias = torch.nn.Parameter(weight.data, requires_grad=False)
            vars(alias).update(vars(weight))
            layer.register_parameter(f"{matrix}_weight_packed", alias)
        # Room for scales in another kernel's layout; biases that some methods create for any layer.
        unread = ("blockscale_swizzled",) if layer.with_bias else ("blockscale_swizzled", "weight_bias")
        for name in unread:
            if hasattr(layer, f"{matrix}_{name}"):
                setattr(layer, f"{matrix}_{name}", None)


def drop_missing_projection(layer: Any, rows: int) -> None:
    """Give the first matrix of experts without a gate the rows of one projection.

    Some of SGLang's methods create it for two whatever the layer says, and the loader then fills half of the rows.

    Args:
        layer: with its parameters created and not yet loaded.
        rows: of one projection.
    """
    weight = parameter(layer, "w13", _WEIGHT)
    assert weight is not None
    if weight.shape[1] != 2 * rows:
        return
    for name, tensor in layer.named_parameters(recurse=False):
        if name.startswith("w13_") and tensor.dim() > 1:
            tensor.data = tensor.data[:, : tensor.shape[1] // 2].clone()


def prepare(layer: Any, scheme: Scheme, *, interleaved: bool, into: ExpertWeights | None) -> ExpertWeights:
    """Prepare the experts of a layer whose parameters are as the checkpoint has them.

    Afterwards the layer's weight parameters are what the op reads, so that the weights exist once.

    Args:
        layer: SGLang's `FusedMoE`.
        scheme: the checkpoint's.
        interleaved: whether the rows of gate and up alternate.
        into: what an earlier call returned for the layer, to be filled again in place.
    """
    tensors: dict[str, Any] = {}
    for matrix in MATRICES:
        tensors[matrix] = _data(parameter(layer, matrix, _WEIGHT))
        tensors[f"{matrix}_scale"] = _data(parameter(layer, matrix, _SCALE))
        tensors[f"{matrix}_global_scale"] = _multiplier(layer, matrix, _GLOBAL_SCALE)
        if scheme.static_activation_scale is not False:
            tensors[f"{matrix}_input_scale"] = _local(layer, _multiplier(layer, matrix, _INPUT_SCALE))
        tensors[f"{matrix}_bias"] = _data(parameter(layer, matrix, ("weight_bias",)))
    gate_up: Literal["halves", "interleaved"] = "interleaved" if interleaved else "halves"
    prepared = b12x_core.prepare_expert_projections(scheme, **tensors, gate_up=gate_up, into=into)
    for matrix in MATRICES:
        read = getattr(prepared, matrix)
        for held in weight_parameters(layer, matrix):
            if held.data_ptr() != read.data_ptr():
                held.b12x_stored = (held.shape, held.dtype)  # type: ignore[attr-defined]
                held.data = read
    return prepared


def restore(layer: Any) -> None:
    """Make room for a checkpoint's weights again where those of the op are laid out in another way."""
    for matrix in MATRICES:
        held = weight_parameters(layer, matrix)
        stored = getattr(held[0], "b12x_stored", None)
        if stored is not None:
            room = torch.empty(stored[0], dtype=stored[1], device=held[0].device)
            for tensor in held:
                tensor.data = room


def _data(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.data


def _multiplier(layer: Any, matrix: str, names: tuple[str, ...]) -> torch.Tensor | None:
    """A scale by which values are multiplied. What compressed-tensors calls a global scale divides them."""
    multiplier, divisor = (parameter(layer, matrix, (name,)) for name in names)
    return _data(multiplier) if divisor is None else 1.0 / divisor.data


def _local(layer: Any, scale: torch.Tensor | None) -> torch.Tensor | None:
    """The rank's part of an input scale, which SGLang keeps for the experts of all ranks in some formats."""
    if scale is None or scale.shape[0] == layer.num_local_experts:
        return scale
    routed = layer.num_local_experts - layer.num_fused_shared_experts
    first = layer.moe_ep_rank * routed
    # Shared experts that were fused into the layer come last, and every rank has all of them.
    return torch.cat([scale[first : first + routed], scale[layer.num_global_routed_experts :]])
