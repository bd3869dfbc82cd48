"""Running kernels that were compiled for sm_120a on a Hopper GPU.

`emulate` replaces, in a kernel's PTX, just the instructions that the GPU lacks (`replace`, `stand_ins.cuh`), assembles
it for that GPU (`retarget`), and links the cubin with the shipped host code (`link`). Loads, layouts, pipelines,
epilogues and launch code stay what a user's GPU runs. `instructions` tests every stand-in against the definition in the
PTX manual.
"""

from b12x_conformance.emulation.errors import (
    EmulationError,
    ToolError,
    ToolMissingError,
    UnknownInstructionError,
)
from b12x_conformance.emulation.link import Artifacts, emulate
from b12x_conformance.emulation.retarget import Retargeted, assemble, retarget

__all__ = [
    "Artifacts",
    "EmulationError",
    "Retargeted",
    "ToolError",
    "ToolMissingError",
    "UnknownInstructionError",
    "assemble",
    "emulate",
    "retarget",
]
