"""What holds for every kernel before it ever runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from b12x_core.planning.inventory import runs_on
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear import SHARED_MEMORY, LinearConfig
from b12x_core.tools.arrivals import early_arrivals
from conftest import SETS, Kernels, table

MATRIX = {
    ("sm_120a", "bf16"): "HMMA.16816.F32.BF16",
    ("sm_120a", "fp16"): "HMMA.16816.F32",
    ("sm_120a", "e4m3"): "QMMA.16832.F32.E4M3.E4M3",
    ("sm_90a", "bf16"): "HMMA.16816.F32.BF16",
    ("sm_90a", "fp16"): "HMMA.16816.F32",
    # Hopper has 8-bit matrix instructions for warpgroups only: a warp's is made of two of 16 bits and conversions.
    ("sm_90a", "e4m3"): "HMMA.16816.F32",
}
"""(architecture, type of the activation) -> the matrix instruction that is meant, and no other."""

BLOCK_SCALED = {
    ("e4m3", "e4m3", "mx32"): "QMMA.SF.16832.F32.E4M3.E4M3.E8",
    ("e2m1", "e4m3", "mx32"): "QMMA.SF.16832.F32.E2M1.E4M3.E8",
    ("e2m1", "e2m1", "mx32"): "OMMA.SF.16864.F32.E2M1.E2M1.E8",
    ("e2m1", "e2m1", "nv16"): "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
}
"""(weight, activation, scales) -> the same for kernels whose instruction takes block scales."""

LAG = {"linear_stream": 0, "linear_tiled": 1}
"""Kernel -> `lag` of `early_arrivals`: whether a loop gives a stage back only when it has begun to read the next."""


def test_nothing_spills(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    found = kernels.resources(spec, arch)
    assert found.registers > 0
    assert found.stack == 0
    assert found.spills == 0


def test_shared_memory_fits_a_block(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    assert kernels.shared(spec, arch) <= SHARED_MEMORY


def test_the_matrix_instruction_is_the_one_that_is_meant(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    found, config = kernels.resources(spec, arch).matrix, spec.config
    if isinstance(config, LinearConfig):
        assert set(found) == {expected(config, arch)}
    else:
        assert not found


def expected(config: LinearConfig, arch: str) -> str:
    """The matrix instruction of a linear kernel."""
    if config.block_scaled:
        return BLOCK_SCALED[config.weight, config.activation, config.scales]
    return MATRIX[arch, config.activation]


def test_the_main_loop_multiplies_as_meant_and_gives_back_what_it_has_read(
    kernels: Kernels, spec: KernelSpec, arch: str
) -> None:
    if spec.kernel not in LAG:
        pytest.skip("it does not multiply")
    assert isinstance(spec.config, LinearConfig)
    loop = kernels.loop(spec, arch)
    assert set(loop.matrix) == {expected(spec.config, arch)}
    assert loop.arrivals > 0
    assert early_arrivals(loop, LAG[spec.kernel]) == []


def test_registers_shared_memory_and_code_are_those_of_the_table(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    """A change of the code or of the compiler shows here. `--update` accepts it."""
    assert kernels.row(spec, arch) == json.loads(table(arch).read_text()).get(spec.name)


def test_the_table_lists_what_planning_can_choose(arch: str) -> None:
    listed = set(json.loads(Path(table(arch)).read_text()))
    assert listed == {spec.name for spec in SETS["all"]() if runs_on(spec, arch)}
