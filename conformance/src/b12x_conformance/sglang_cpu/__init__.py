"""SGLang on a machine without a GPU, so that its adapter can be proven anywhere.

The wheels that people install are built for CUDA: SGLang takes its CPU engine only if SGLANG_USE_CPU_ENGINE=1, and then
imports the compiled package `sgl_kernel`, which does not load without a GPU's libraries. `activate` chooses the CPU
engine and puts a stand-in for that package before the installed one, for this process and those that it starts.
`lift_limits` is an entry point in the group `sglang.srt.plugins`, which SGLang calls in each of its processes; it takes
away what SGLang demands of a CPU for the sake of its own kernels. Both do nothing unless B12X_CONFORMANCE_CPU=1.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from b12x_conformance.environment import CPU

STUB = Path(__file__).parent / "stub"
"""Folder that holds the stand-in package."""

_CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def activate() -> None:
    """Let SGLang run on the CPU. To be called before any of its modules is imported; may be called again.

    Raises:
        RuntimeError: SGLang was imported already, with the choice made.
    """
    if CPU.get() != "1" or importlib.util.find_spec("sglang") is None:
        return
    os.environ[_CPU_ENGINE] = "1"
    if str(STUB) in sys.path:
        return
    if "sglang.srt" in sys.modules:
        raise RuntimeError("SGLang was imported before b12x_conformance.sglang_cpu.activate() was called")
    sys.path.insert(0, str(STUB))
    paths = [str(STUB), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def lift_limits() -> None:
    """Entry point: see `b12x_conformance.sglang_cpu.limits`."""
    if CPU.get() == "1" and os.environ.get(_CPU_ENGINE) == "1":
        from b12x_conformance.sglang_cpu import limits

        limits.lift()
