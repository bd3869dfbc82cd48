"""vLLM on a machine without a GPU, so that its adapter can be proven anywhere.

The wheel of vLLM that people install is built for CUDA and finds no device on such a machine. `activate` is its entry
point in the group `vllm.platform_plugins`; with B12X_CONFORMANCE_CPU=1 it gives vLLM the platform of
`b12x_conformance.vllm_cpu.platform`, on which the engine runs whole (scheduler, KV cache, weight loading, server) with
plain torch in place of the compiled helpers (`b12x_conformance.vllm_cpu.ops`). Otherwise it does nothing.
"""

from __future__ import annotations

from b12x_conformance.environment import CPU

_PLATFORM = "b12x_conformance.vllm_cpu.platform.ReferenceCpuPlatform"


def activate() -> str | None:
    """The dotted path of the platform class, None unless B12X_CONFORMANCE_CPU=1.

    vLLM calls it in every process, before its own platform exists, so nothing of vLLM is imported here.
    """
    return _PLATFORM if CPU.get() == "1" else None
