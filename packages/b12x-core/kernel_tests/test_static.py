"""What holds for every kernel before it ever runs."""

from __future__ import annotations

import json
from pathlib import Path

from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear import SHARED_MEMORY, LinearConfig
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


def test_nothing_spills(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    found = kernels.resources(spec, arch)
    assert found.registers > 0
    assert found.stack == 0
    assert found.spills == 0


def test_shared_memory_fits_a_block(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    assert kernels.shared(spec, arch) <= SHARED_MEMORY


def test_the_matrix_instruction_is_the_one_that_is_meant(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    found = kernels.resources(spec, arch).matrix
    if isinstance(spec.config, LinearConfig):
        assert set(found) == {MATRIX[arch, spec.config.activation]}
    else:
        assert not found


def test_registers_shared_memory_and_code_are_those_of_the_table(kernels: Kernels, spec: KernelSpec, arch: str) -> None:
    """A change of the code or of the compiler shows here. `--update` accepts it."""
    assert kernels.row(spec, arch) == json.loads(table(arch).read_text()).get(spec.name)


def test_the_table_lists_what_planning_can_choose(arch: str) -> None:
    listed = set(json.loads(Path(table(arch)).read_text()))
    assert listed == {spec.name for spec in SETS["all"]()}
