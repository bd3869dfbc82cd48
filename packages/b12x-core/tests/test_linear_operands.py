"""What the linear kernels read for each scheme, on each architecture."""

from __future__ import annotations

import pytest
import torch
from b12x_core.capabilities import Op, Tier, support_table
from b12x_core.formats import SCHEMES
from b12x_core.ops._linear_kernel import kernels_for, operands_on
from b12x_core.planning import inventory
from b12x_core.planning.linear import LinearConfig
from b12x_core.planning.linear_operands import Operands, operands
from b12x_core.runtime.devices import DeviceFacts, fake

DECODED = {
    "mxfp8-w8a16": Operands("e4m3", "", "mx32", ""),
    "nvfp4-w4a16": Operands("e2m1", "", "nv16", ""),
    "mxfp4-w4a16": Operands("e2m1", "", "mx32", ""),
}
ROUNDED = {
    "mxfp8": Operands("e4m3", "bf16", "mx32", "values"),
    "nvfp4-w4a4": Operands("e2m1", "bf16", "nv16", "values"),
    "nvfp4-w4a8": Operands("e2m1", "bf16", "nv16", "values"),
    "nvfp4-w4a8-fp8": Operands("e2m1", "bf16", "nv16", "values"),
    "mxfp4-w4a4": Operands("e2m1", "bf16", "mx32", "values"),
    "mxfp4-w4a8": Operands("e2m1", "bf16", "mx32", "values"),
    "mxfp4-w4a8-fp8": Operands("e2m1", "bf16", "mx32", "values"),
}
BLOCK_SCALED = {
    "mxfp8": Operands("e4m3", "e4m3", "mx32", "tiles64"),
    "nvfp4-w4a4": Operands("e2m1", "e2m1", "nv16", "tiles128"),
    "mxfp4-w4a4": Operands("e2m1", "e2m1", "mx32", "tiles128"),
    "mxfp4-w4a8": Operands("e2m1", "e4m3", "mx32", "tiles128"),
}
EXPECTED = {"sm_90a": DECODED | ROUNDED, "sm_120a": DECODED | ROUNDED | BLOCK_SCALED}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a", "sm_121a"])
def test_operands_of_schemes_with_scales_in_the_tiles(arch: str) -> None:
    expected = EXPECTED.get(arch, EXPECTED["sm_120a"])
    found = {name: operands(scheme, arch) for name, scheme in SCHEMES.items()}
    assert {name: read for name, read in found.items() if read.scaled_tiles} == expected


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("m", [2, 33])
def test_a_quantized_activation_is_always_quantized_first(name: str, arch: str, m: int) -> None:
    """A checkpoint of four-bit activations is never run with those of 16 bits."""
    scheme = SCHEMES[name]
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    first, *others = kernels_for(scheme, dtype, dtype, m, 128, 512, DeviceFacts(arch, 132, 232_448))
    assert isinstance(first.config, LinearConfig)
    assert bool(others) == scheme.activation.quantized
    for spec in others:
        assert spec.kernel == "quantize"
        assert spec.config.format == scheme.activation.name  # type: ignore[attr-defined]
    assert inventory.runs_on(first, arch)


def test_weights_are_laid_out_for_the_device() -> None:
    scheme = SCHEMES["nvfp4-w4a4"]
    assert operands_on(scheme, torch.device("cpu")) == ROUNDED["nvfp4-w4a4"]
    with fake(DeviceFacts("sm_121a", 48, 101_376)):
        assert operands_on(scheme, torch.device("cuda", 0)) == BLOCK_SCALED["nvfp4-w4a4"]


def test_the_support_table_names_the_kernel() -> None:
    table = {row.scheme: row.kernels for row in support_table() if row.op is Op.LINEAR}
    assert table["nvfp4-w4a4"][Tier.NATIVE] == "linear_block_scaled"
    assert table["nvfp4-w4a4"][Tier.PORTABLE] == "linear_decoded"
    assert table["nvfp4-w4a16"][Tier.NATIVE] == "linear_decoded"
    assert table["fp8-block"][Tier.NATIVE] == "linear"
    assert set(table) == set(SCHEMES)


def test_what_an_architecture_has_no_instruction_for_is_not_planned_for_it() -> None:
    portable, native, either = (inventory.representative(arch) for arch in ("sm_90a", "sm_120a", None))
    assert all(inventory.runs_on(spec, "sm_90a") for spec in portable)
    assert any(not inventory.runs_on(spec, "sm_90a") for spec in native)
    assert all(inventory.runs_on(spec, "sm_120a") for spec in either)
    assert set(either) == {*portable, *native}
