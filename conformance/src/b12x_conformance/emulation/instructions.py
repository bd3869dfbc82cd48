"""A test of every stand-in: small kernels compiled for sm_120a, emulated, and compared with the manual's definition.

CUTE_DSL_ARCH=sm_120a python -m b12x_conformance.emulation build FOLDER  # needs the CuTe DSL, nvcc, ptxas, cc
python -m b12x_conformance.emulation check FOLDER                        # needs a Hopper GPU, torch, tvm_ffi
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from b12x_conformance.emulation import probes_arithmetic, probes_cvt, probes_memory, probes_mma
from b12x_conformance.emulation.link import emulate
from b12x_conformance.emulation.probe import Probe


@dataclass(frozen=True)
class Case:
    """A probe as a library to build on one machine and to check on another."""

    name: str
    probe: Probe

    def build(self, folder: str | Path, arch: str = "sm_90a") -> Path:
        """Compile for sm_120a and emulate for `arch`; returns the shared library.

        Raises:
            RuntimeError: CUTE_DSL_ARCH names no architecture of the sm_120 family.
        """
        if not os.environ.get("CUTE_DSL_ARCH", "").startswith("sm_12"):
            raise RuntimeError("set CUTE_DSL_ARCH=sm_120a before the CuTe DSL is imported")
        return emulate(self.probe.compile(), arch, out=Path(folder, f"{self.name}.so"))

    def check(self, library: str | Path) -> str:
        """Run a library on the current GPU and compare; returns how far off the worst result was.

        Raises:
            AssertionError: a result is off by more than the definition allows.
        """
        import torch
        from b12x_core.runtime import libraries

        launch = libraries.load().load_module(str(Path(library).resolve()))["launch"]
        data = self.probe.data()
        inputs = torch.from_numpy(data.view(np.int32)).cuda().view(torch.uint32)
        shape = (data.shape[0], len(self.probe.snippets), 32, self.probe.n_out)
        outputs = torch.full(shape, 0x55AA55AA, dtype=torch.int32, device="cuda").view(torch.uint32)
        launch(inputs, outputs, data.shape[0])
        torch.cuda.synchronize()
        return self.probe.verify(outputs.view(torch.int32).cpu().numpy().view(np.uint32))


def cases() -> Iterator[Case]:
    """A case for every group of instructions."""
    for family in (probes_mma, probes_memory, probes_cvt, probes_arithmetic):
        for probe in family.probes():
            yield Case(probe.name, probe)
