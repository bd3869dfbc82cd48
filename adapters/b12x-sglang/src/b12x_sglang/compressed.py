"""What a compressed-tensors checkpoint declares for a group of layers, as far as SGLang's configuration keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from b12x_core import Scheme, compressed_tensors


def declared(config: Any, group: Mapping[str, Any]) -> tuple[Scheme | None, str]:
    """The scheme of a group, None for what the core has no scheme for, and the group in words.

    Args:
        config: SGLang's `CompressedTensorsConfig`.
        group: what it has for a layer: "weights", "input_activations".
    """
    weights, inputs = group["weights"], group["input_activations"]
    if inputs is None:
        inputs = _dropped_inputs(config, weights)
    return compressed_tensors.scheme(weights, inputs), f"weights {weights} and activations {inputs}"


def _dropped_inputs(config: Any, weights: Any) -> Any:
    """What a checkpoint declares for activations beside weights, None for weights alone.

    SGLang reads it for some values of `format` only, and mxfp4-pack-quantized is none of them.
    """
    kind = type(weights)
    for group in config.config["config_groups"].values():
        if group.get("input_activations") and kind.model_validate(group["weights"]) == weights:
            return kind.model_validate(group["input_activations"])
    return None
