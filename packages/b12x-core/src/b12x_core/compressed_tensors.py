"""What the config groups of compressed-tensors checkpoints mean, in schemes of the core.

Engines parse a group into `QuantizationArgs` of the library compressed-tensors. They are read by attribute here, so
that the core does not depend on the library; an attribute that is missing has the library's default.
"""

from __future__ import annotations

from typing import Any

from b12x_core.errors import ArgumentError
from b12x_core.formats import BF16, FP8_BLOCK, FP8_GROUP, FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, Format, Scheme


def scheme(weights: Any, inputs: Any) -> Scheme | None:
    """The scheme that a config group declares.

    Args:
        weights: `QuantizationArgs` of the weights.
        inputs: those of the input activations, None where a checkpoint quantizes weights alone.

    Returns:
        None for what the core has no scheme for. fp8-tensor activations may be static or dynamic by `inputs.dynamic`.
    """
    weight, activation = _weight(weights), BF16 if inputs is None else _activation(inputs)
    if weight is None or activation is None:
        return None
    try:
        return Scheme(weight, activation)
    except ArgumentError:
        return None


def _weight(arguments: Any) -> Format | None:
    strategy = arguments.strategy
    if getattr(arguments, "dynamic", False):
        return None
    if strategy == "block" and list(arguments.block_structure or ()) == [128, 128]:
        return FP8_BLOCK if _is_float(arguments, 8) else None
    if strategy == "channel":
        return FP8_ROW if _is_float(arguments, 8) else None
    return _of_either(arguments)


def _activation(arguments: Any) -> Format | None:
    strategy, dynamic = arguments.strategy, getattr(arguments, "dynamic", False)
    if strategy == "tensor" and dynamic in (True, False):
        return _of_either(arguments)
    if strategy == "tensor_group":
        # Scales of groups are always found at run time. "local" says that the global one stands in the checkpoint.
        return None if dynamic is True else _of_either(arguments)
    if dynamic is not True:
        return None
    if strategy == "token":
        return FP8_ROW if _is_float(arguments, 8) else None
    if strategy == "group" and arguments.group_size == 128:
        return FP8_GROUP if _is_float(arguments, 8) else None
    return _of_either(arguments)


def _of_either(arguments: Any) -> Format | None:
    """The format of weights or activations where both are declared alike."""
    strategy = arguments.strategy
    if strategy == "tensor":
        return FP8_TENSOR if _is_float(arguments, 8) else None
    if strategy == "tensor_group" and arguments.group_size == 16:
        return NVFP4 if _is_float(arguments, 4) else None
    if strategy == "group" and arguments.group_size == 32:
        if _is_float(arguments, 4):
            return MXFP4
        # Eight bits in groups of 32 may have scales that are no powers of two; of four, there is one format only.
        powers = str(getattr(arguments, "scale_dtype", None)) == "torch.uint8"
        return MXFP8 if powers and _is_float(arguments, 8) else None
    return None


def _is_float(arguments: Any, bits: int) -> bool:
    return bool(arguments.type == "float" and arguments.num_bits == bits and getattr(arguments, "symmetric", True))
