"""The value b12x of SGLang's flags: offered, accepted, remembered.

SGLang lists the values of its flags in lists that plug-ins may extend. Two of the flags end in closed enumerations all
the same; the functions that fill these from the configuration are the only place where another value can pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from b12x_sglang.hooking import hook, require_hooks

FLAG = "b12x"
"""Value of the flags."""


def register() -> None:
    """Offer the value, and let it pass the two enumerations."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookType

    for offer in (
        choices.add_attention_backend_choices,
        choices.add_draft_attention_backend_choices,
        choices.add_moe_runner_backend_choices,
        choices.add_mxfp8_moe_runner_backend_choices,
        choices.add_fp8_gemm_runner_backend_choices,
        choices.add_fp4_gemm_runner_backend_choices,
    ):
        offer([FLAG])
    quantization = "sglang.srt.layers.quantization"
    hook(f"{quantization}.fp8_utils.initialize_fp8_gemm_config", _initialize_fp8, HookType.AROUND)
    hook(f"{quantization}.fp4_utils.initialize_fp4_gemm_config", _initialize_fp4, HookType.AROUND)


def fp8_requested() -> bool:
    """Whether --fp8-gemm-backend is b12x in this process."""
    return bool(_kernels().fp8_gemm_runner_backend == FLAG)


def fp4_requested() -> bool:
    """Whether --fp4-gemm-backend is b12x in this process."""
    return bool(_kernels().fp4_gemm_runner_backend == FLAG)


def moe_requested() -> bool:
    """Whether --moe-runner-backend (for a draft model, --speculative-moe-runner-backend) is b12x in this process."""
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    return bool(get_moe_runner_backend().value == FLAG)


def _kernels() -> Any:
    from sglang.srt.runtime_context import get_exec

    return get_exec().kernel


def _initialize_fp8(initialize: Callable[[], None]) -> None:
    """Leave `auto` to the layers that are not served, which are none unless SGLang asks for another kernel itself.

    SGLang comes by here at every start, with its flags settled and no layer built.

    Raises:
        UnsupportedError: a flag is b12x, and SGLang did not apply all hooks.
    """
    from sglang.srt.layers.quantization import fp8_utils
    from sglang.srt.runtime_context import attention_backends

    if FLAG in attention_backends() or fp8_requested() or fp4_requested() or moe_requested():
        require_hooks()
    if fp8_requested():
        fp8_utils.FP8_GEMM_RUNNER_BACKEND = fp8_utils.Fp8GemmRunnerBackend.AUTO
    else:
        initialize()


def _initialize_fp4(initialize: Callable[[], None]) -> None:
    """As `_initialize_fp8`, for the other enumeration."""
    from sglang.srt.layers.quantization import fp4_utils

    if fp4_requested():
        fp4_utils.FP4_GEMM_RUNNER_BACKEND = fp4_utils.Fp4GemmRunnerBackend.AUTO
    else:
        initialize()
