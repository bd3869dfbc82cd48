"""Config groups of compressed-tensors checkpoints, read into schemes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from b12x_core import compressed_tensors

DEFAULTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "dynamic": False,
    "scale_dtype": None,
}
TENSOR = {"strategy": "tensor"}
CHANNEL = {"strategy": "channel"}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
TOKEN = {"strategy": "token", "dynamic": True}
GROUP_128 = {"strategy": "group", "group_size": 128, "dynamic": True}
MXFP8 = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
MXFP4 = {"strategy": "group", "group_size": 32, "num_bits": 4}
NVFP4 = {"strategy": "tensor_group", "group_size": 16, "num_bits": 4}
DYNAMIC = {"dynamic": True}


def scheme(weights: dict[str, Any], inputs: dict[str, Any] | None) -> str | None:
    arguments = [given and SimpleNamespace(**{**DEFAULTS, **given}) for given in (weights, inputs)]
    found = compressed_tensors.scheme(*arguments)
    return found and found.name


@pytest.mark.parametrize(
    ("weights", "inputs", "name"),
    [
        (TENSOR, TENSOR, "fp8-tensor"),
        (TENSOR, TENSOR | DYNAMIC, "fp8-tensor"),
        (TENSOR, TOKEN, "fp8-tensor-token"),
        (TENSOR, None, "fp8-tensor-w8a16"),
        (CHANNEL, TOKEN, "fp8-channel"),
        (CHANNEL, TENSOR, "fp8-channel-tensor"),
        (CHANNEL, None, "fp8-channel-w8a16"),
        (BLOCK, GROUP_128, "fp8-block"),
        (BLOCK, None, "fp8-block-w8a16"),
        (MXFP8, MXFP8 | DYNAMIC, "mxfp8"),
        (MXFP8, None, "mxfp8-w8a16"),
        (MXFP4, MXFP4 | DYNAMIC, "mxfp4-w4a4"),
        (MXFP4, MXFP8 | DYNAMIC, "mxfp4-w4a8"),
        (MXFP4, TOKEN, "mxfp4-w4a8-fp8"),
        (MXFP4, None, "mxfp4-w4a16"),
        (NVFP4, NVFP4 | {"dynamic": "local"}, "nvfp4-w4a4"),
        (NVFP4, NVFP4, "nvfp4-w4a4"),
        (NVFP4, MXFP8 | DYNAMIC, "nvfp4-w4a8"),
        (NVFP4, TOKEN, "nvfp4-w4a8-fp8"),
        (NVFP4, None, "nvfp4-w4a16"),
    ],
)
def test_scheme(weights: dict[str, Any], inputs: dict[str, Any] | None, name: str) -> None:
    assert scheme(weights, inputs) == name


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        (TENSOR | {"type": "int"}, None),
        (TENSOR | {"num_bits": 4}, None),
        (TENSOR | {"symmetric": False}, None),
        (TENSOR | DYNAMIC, None),
        (BLOCK | {"block_structure": [64, 128]}, None),
        (BLOCK | {"block_structure": None}, None),
        (MXFP8 | {"scale_dtype": None}, None),
        (MXFP4 | {"group_size": 64}, None),
        (NVFP4 | {"group_size": 32}, None),
        (NVFP4, NVFP4 | DYNAMIC),
        (MXFP4, MXFP4),
        (MXFP4, MXFP8 | DYNAMIC | {"scale_dtype": None}),
        (CHANNEL, TOKEN | {"dynamic": False}),
        (CHANNEL, TOKEN | {"type": "int"}),
        (CHANNEL, TENSOR | {"dynamic": "local"}),
        (CHANNEL, CHANNEL),
        (BLOCK, TOKEN),
        (BLOCK, BLOCK | DYNAMIC),
        (BLOCK, GROUP_128 | {"dynamic": False}),
    ],
)
def test_what_the_core_has_no_scheme_for(weights: dict[str, Any], inputs: dict[str, Any] | None) -> None:
    assert scheme(weights, inputs) is None


def test_attributes_may_be_missing_and_a_dtype_may_be_text() -> None:
    """As in the JSON of a checkpoint."""
    weights = SimpleNamespace(type="float", num_bits=8, strategy="group", group_size=32, scale_dtype="torch.uint8")
    inputs = SimpleNamespace(**vars(weights), dynamic=True)
    found = compressed_tensors.scheme(weights, inputs)
    assert found is not None
    assert found.name == "mxfp8"
