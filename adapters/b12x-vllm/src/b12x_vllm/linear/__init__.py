"""vLLM's linear layers on `b12x_core.linear`: what --linear-backend b12x selects.

`kernels` holds a class for each of vLLM's kernel kinds, `checkpoint` keeps what vLLM's loading code would lose of a
checkpoint before a kernel sees it. Both say per class or hook which interface of vLLM they rest on.
"""

from __future__ import annotations

import functools
from typing import Any

import vllm.model_executor.kernels.linear as engine
from vllm.platforms import PlatformEnum

from b12x_vllm.linear import checkpoint
from b12x_vllm.linear.kernels import (
    B12xFp8BlockLinear,
    B12xFp8Linear,
    B12xFp8W8A16Linear,
    B12xMxFp4Linear,
    B12xMxFp8Linear,
    B12xNvFp4Linear,
    B12xNvFp4W4A16Linear,
    LinearKernel,
)

FLAG = "b12x"
"""Value of --linear-backend."""

PLATFORMS = (PlatformEnum.CUDA, PlatformEnum.CPU, PlatformEnum.OOT)

KERNELS: dict[type[LinearKernel], str] = {
    B12xFp8Linear: "fp8",
    B12xFp8BlockLinear: "fp8_block",
    B12xMxFp8Linear: "mxfp8",
    B12xNvFp4Linear: "nvfp4",
    B12xNvFp4W4A16Linear: "nvfp4",
    B12xMxFp4Linear: "mxfp4",
}
"""The kernel classes with the kind that `register_linear_kernel` knows them by. The FP8 W8A16 table has no kind."""


def register() -> None:
    """Put the kernels behind --linear-backend b12x. Calls after the first do nothing.

    They are appended to vLLM's tables, so that `auto` keeps preferring the engine's own kernels, and replace what the
    flag stood for, so that an installed upstream package of the same name never answers to it.
    """
    backends = engine._LINEAR_BACKEND_KERNEL_MAP
    ours: set[type] = {*KERNELS, B12xFp8W8A16Linear}
    if backends.get(FLAG) == ours:
        return
    for platform in PLATFORMS:
        for kernel, kind in KERNELS.items():
            engine.register_linear_kernel(kernel, platform, kind)
        engine._POSSIBLE_WFP8A16_KERNELS.setdefault(platform, []).append(B12xFp8W8A16Linear)
    backends[FLAG] = ours
    # Selection for NVFP4 W4A16 considers no classes but a few that it reads from its module by name.
    engine.B12xNvFp4W4A16LinearKernel = B12xNvFp4W4A16Linear
    engine._resolve_backend_kernels = _without_w4a16_for_w4a4(engine._resolve_backend_kernels)
    checkpoint.install(requested)


def requested(quantization: str) -> bool:
    """Whether the current configuration asks for these kernels (key of vLLM's `linear_backend_per_quant`)."""
    return bool(engine._get_linear_backend(quantization=quantization) == FLAG)


def _without_w4a16_for_w4a4(resolve: Any) -> Any:
    """Leave the W4A16 kernel out of a selection for W4A4.

    vLLM keeps both in one table and takes the first that accepts. Where the W4A4 kernel refuses, its reason must reach
    the user; the next in the table would serve the checkpoint with another numeric.
    """

    @functools.wraps(resolve)
    def resolve_backend_kernels(kernels: list[type], layer_desc: str, *, quantization: str, **rest: Any) -> list[type]:
        chosen: list[type] = resolve(kernels, layer_desc, quantization=quantization, **rest)
        if quantization == "nvfp4_w4a4":
            return [kernel for kernel in chosen if kernel is not B12xNvFp4W4A16Linear]
        return chosen

    return resolve_backend_kernels


__all__ = [
    "FLAG",
    "KERNELS",
    "PLATFORMS",
    "B12xFp8BlockLinear",
    "B12xFp8Linear",
    "B12xFp8W8A16Linear",
    "B12xMxFp4Linear",
    "B12xMxFp8Linear",
    "B12xNvFp4Linear",
    "B12xNvFp4W4A16Linear",
    "register",
    "requested",
]
