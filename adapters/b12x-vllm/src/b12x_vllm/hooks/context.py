"""What vLLM's layers expect around them, without an engine: a platform, plug-ins, a configuration, process groups.

Everything here may be entered while no engine exists, while one runs, or after one was closed, in any order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from b12x_core import UnsupportedError
from b12x_core.adapter_support import restored_environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_PLATFORM_SWITCH = "B12X_CONFORMANCE_CPU"
"""Switch of the vLLM platform plug-in that the distribution b12x-conformance carries (the adapter never imports it).

vLLM's own wheel is built for CUDA and finds no device on a machine without a GPU; that plug-in is how it starts there.
vLLM looks for plug-ins once a process, so the variable must be set before any of its modules asks for the platform.
"""


def prepare(device: str) -> None:
    """Make this process ready for vLLM layers on a device: platform chosen, general plug-ins loaded.

    Args:
        device: "cpu", "cuda" or "cuda:<index>".

    Raises:
        UnsupportedError: vLLM runs on another kind of device in this process, or on none.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        os.environ.setdefault(CPU_PLATFORM_SWITCH, "1")

    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    if current_platform.device_type != kind:
        found = current_platform.device_type or "no device"
        remedy = f"install b12x-conformance and start with {CPU_PLATFORM_SWITCH}=1" if kind == "cpu" else "use a GPU"
        raise UnsupportedError(f"vLLM runs on {found} in this process, but the case is for {kind}: {remedy}")
    load_general_plugins()


@contextmanager
def layer_context(dtype: torch.dtype, device: str, **config: Any) -> Iterator[VllmConfig]:
    """A configuration under which vLLM layers can be built and run outside an engine, with every b12x flag set.

    Inside, the default dtype and device are the given ones, as they are while vLLM loads a model.

    Args:
        dtype: torch.bfloat16 or torch.float16, of activations.
        device: where the layers live.
        **config: fields of `VllmConfig` that replace the ones chosen here.

    Yields:
        The current `VllmConfig`. Each context has its own, so layer names may repeat from one to the next.
    """
    prepare(device)

    from vllm.config import (
        AttentionConfig,
        CompilationConfig,
        CompilationMode,
        DeviceConfig,
        KernelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    fields: dict[str, Any] = {
        "device_config": DeviceConfig(device=device),
        "attention_config": AttentionConfig(backend=AttentionBackendEnum.B12X),
        "kernel_config": KernelConfig(linear_backend="b12x", moe_backend="b12x"),
        # Layers run as they are written: a case is about the kernel, not about the compiler.
        "compilation_config": CompilationConfig(mode=CompilationMode.NONE),
        **config,
    }
    with restored_environment(), set_default_torch_dtype(dtype), torch.device(device):
        vllm_config = VllmConfig(**fields)
        with set_current_vllm_config(vllm_config):
            _ensure_groups(device)
            _ensure_workspace(device)
            yield vllm_config


@contextmanager
def forward_context(
    vllm_config: VllmConfig,
    num_tokens: int,
    attn_metadata: Mapping[str, Any] | None = None,
    slot_mapping: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[None]:
    """What layers read during a forward pass: the configuration they were built under, and the batch.

    Args:
        vllm_config: what `layer_context` yielded when the layer was built.
        num_tokens: rows of the batch.
        attn_metadata: by layer name, what the layer's metadata builder made. None outside attention.
        slot_mapping: by layer name, (T,) int64.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    device = str(vllm_config.device_config.device)
    with set_current_vllm_config(vllm_config):
        # An engine that was closed since the layer was built took these down with it.
        _ensure_groups(device)
        _ensure_workspace(device)
        with set_forward_context(
            dict(attn_metadata) if attn_metadata is not None else None,
            vllm_config,
            num_tokens=num_tokens,
            slot_mapping=dict(slot_mapping) if slot_mapping is not None else None,
        ):
            yield


def _ensure_groups(device: str) -> None:
    """Create the process groups of a single worker unless they exist. Needs a current `VllmConfig`."""
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_file_store_init_method

    if model_parallel_is_initialized():
        return
    init_distributed_environment(
        world_size=1,
        rank=0,
        distributed_init_method=get_file_store_init_method(),
        local_rank=torch.device(device).index or 0,
        backend=current_platform.dist_backend,
    )
    ensure_model_parallel_initialized(1, 1)


def _ensure_workspace(device: str) -> None:
    """Create the scratch memory that MoE layers share unless it exists."""
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    if not is_workspace_manager_initialized():
        init_workspace_manager(torch.device(device))
