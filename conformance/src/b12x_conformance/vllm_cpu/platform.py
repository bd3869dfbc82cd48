"""The vLLM platform that `activate` chooses: vLLM's CPU platform, with attention backends of plug-ins allowed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

from b12x_conformance.vllm_cpu import ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


class ReferenceCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, changed where a test run needs it.

    - `--attention-backend` is honoured. vLLM's own CPU platform logs that it cannot and takes its compiled kernel.
    - Custom ops run their plain torch form: their compiled form is not in a CUDA wheel.
    - The compiled helpers that remain have stand-ins in plain torch (`b12x_conformance.vllm_cpu.ops`).
    - Small functions that vLLM compiles one by one run as they are: compiling them takes longer than a whole test, and
      a C++ compiler that the machine may not have.
    - A server of one worker runs it in the engine's process. vLLM's CPU platform gives it a process of its own, to bind
      threads to cores, at the cost of importing everything once more.

    It stays `PlatformEnum.CPU`: much of vLLM asks `is_cpu()` where it would otherwise touch a GPU.
    """

    simple_compile_backend = "eager"
    _overrides_registered = False

    @classmethod
    def import_kernels(cls) -> None:
        """Load the CPU extension where the installed vLLM has one, and stand in for the ops that are missing."""
        if any(importlib.util.find_spec(f"vllm.{name}") for name in ("_C", "_C_AVX2", "_C_AVX512")):
            super().import_kernels()
        ops.define_missing()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace Triton kernels by calls of CPU ops, once a process.

        Every worker asks for it. The replacement lasts, and a second one would fail where an engine with n-gram
        speculation ran before: vLLM then inspects objects of llvmlite that pretend to have any attribute.
        """
        if not ReferenceCpuPlatform._overrides_registered:
            ReferenceCpuPlatform._overrides_registered = True
            super().register_triton_kernel_overrides()

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Complete the configuration as on any CPU, but for what the class changes."""
        parallel = vllm_config.parallel_config
        executor = parallel.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        if executor == "uni":
            parallel.distributed_executor_backend = executor
        custom_ops = vllm_config.compilation_config.custom_ops
        # vLLM has put the base mode there by now; both modes at once are an error.
        custom_ops[:] = ["none" if mode == "all" else mode for mode in custom_ops]

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Dotted path of the backend asked for, as on CUDA: validated, and refused with every reason at once.

        Raises:
            ValueError: the backend asked for refuses the layer.
        """
        if selected_backend is None or selected_backend.name.startswith("CPU_"):
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        backend = selected_backend.get_class()
        # No compute capability, said in a way that a backend which judges by it can read.
        capability = DeviceCapability(0, 0)
        reasons = backend.validate_configuration(device_capability=capability, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(
                f"attention backend {selected_backend.name} cannot serve this layer: {'; '.join(reasons)} "
                f"({attn_selector_config!r})"
            )
        return str(selected_backend.get_path())
