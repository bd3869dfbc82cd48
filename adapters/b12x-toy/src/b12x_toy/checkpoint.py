"""From the tensors of a checkpoint to the prepared weights of `b12x_core`.

Projections that an engine fuses (q, k, v; gate, up) are stored one by one, each with scales of its own. Here they are
only put below each other: the core makes one weight of them without losing a scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from b12x_core import (
    NVFP4,
    SCHEMES,
    ArgumentError,
    ExpertWeights,
    LinearWeights,
    Scheme,
    UnsupportedError,
    compressed_tensors,
    prepare_expert_projections,
    prepare_projections,
)

EXPERT_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up and down in checkpoints of mixtures of experts."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """How a checkpoint stores a quantized projection: its scheme, and what its tensors are called."""

    scheme: Scheme
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str = "weight_scale_2"
    input_scale: str = "input_scale"
    divisors: bool = False  # global and input scale are stored as what to divide by

    def read(self, tensors: Tensors, projections: Sequence[str], tensor: str) -> torch.Tensor | None:
        """A tensor of some projections, one below the other; None where the checkpoint has no such tensor."""
        found = [tensors[name] for name in (f"{projection}.{tensor}" for projection in projections) if name in tensors]
        if not found:
            return None
        if len(found) < len(projections):
            raise ArgumentError(f"checkpoint: only some of {', '.join(projections)} have {tensor}")
        whole = torch.cat([torch.atleast_1d(part) for part in found])
        return 1.0 / whole if self.divisors and tensor in (self.global_scale, self.input_scale) else whole


def packing_of(quantization: Mapping[str, Any] | None) -> Packing:
    """The packing that the `quantization_config` of a config.json describes.

    Raises:
        UnsupportedError: one that the toy engine does not read.
    """
    match quantization:
        case {"quant_method": "modelopt", "quant_algo": "NVFP4"}:
            return Packing(SCHEMES["nvfp4-w4a4"])
        case {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}:
            return Packing(SCHEMES["nvfp4-w4a16"])
        case {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}:
            return Packing(SCHEMES["fp8-block"], scale="weight_scale_inv")
        case {"quant_method": "compressed-tensors", "config_groups": {"group_0": group, **others}} if not others:
            arguments = (group["weights"], group.get("input_activations"))
            scheme = compressed_tensors.scheme(*(part and SimpleNamespace(**part) for part in arguments))
            if scheme is not None and scheme.weight == NVFP4:
                names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
                return Packing(scheme, *names, divisors=True)
            if scheme is not None:
                return Packing(scheme, "weight_packed" if scheme.weight.packed > 1 else "weight")
    stored = quantization or {}
    found = [f"{key} {stored[key]}" for key in ("quant_method", "quant_algo") if key in stored]
    raise UnsupportedError(
        "the toy engine reads NVFP4 of ModelOpt, FP8 in blocks of 128 x 128 with dynamic activations, and one group of "
        f"compressed-tensors in a scheme of b12x; got {', '.join(found) or 'an unquantized layer'}"
    )


def load_linear(packing: Packing, tensors: Tensors, projections: Sequence[str]) -> LinearWeights:
    """One weight for some projections of the same input."""

    def stored(tensor: str) -> Any:
        return packing.read(tensors, projections, tensor)

    return prepare_projections(
        packing.scheme,
        [tensors[f"{projection}.{packing.weight}"].shape[0] for projection in projections],
        stored(packing.weight),
        stored(packing.scale),
        global_scale=stored(packing.global_scale),
        input_scale=stored(packing.input_scale),
        bias=stored("bias"),
    )


def load_experts(packing: Packing, tensors: Tensors, experts: Sequence[str]) -> ExpertWeights:
    """The weights of the experts with some names. Those without a gate projection are not gated."""
    known = [
        [name for name in names if f"{experts[0]}.{name}.{packing.weight}" in tensors] for names in EXPERT_PROJECTIONS
    ]
    *first, second = max(known, key=len)

    def stored(projections: Sequence[str], tensor: str) -> Any:
        names = [f"{expert}.{projection}" for expert in experts for projection in projections]
        whole = packing.read(tensors, names, tensor)
        return None if whole is None else whole.unflatten(0, (len(experts), -1))

    def of_second(tensor: str) -> torch.Tensor | None:
        return packing.read(tensors, [f"{expert}.{second}" for expert in experts], tensor)

    return prepare_expert_projections(
        packing.scheme,
        stored(first, packing.weight),
        stored(first, packing.scale),
        stored([second], packing.weight),
        stored([second], packing.scale),
        w13_global_scale=stored(first, packing.global_scale),
        w2_global_scale=of_second(packing.global_scale),
        w13_input_scale=stored(first, packing.input_scale),
        w2_input_scale=of_second(packing.input_scale),
    )
