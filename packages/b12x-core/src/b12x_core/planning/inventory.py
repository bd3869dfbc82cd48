"""Every kernel that planning can choose for the models of `b12x_core.planning.models`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear_plan import LinearProblem, plan_linear
from b12x_core.planning.models import BENCHMARKED, MULTIPROCESSORS, TOKENS, linear_shapes
from b12x_core.planning.quantize import FORMATS, plan_quantize

OPERANDS = (
    ("bf16", "bf16", "end"),
    ("fp16", "fp16", "end"),
    ("e4m3", "e4m3", "end"),
    ("e4m3", "e4m3", "block"),
    ("e4m3", "bf16", "end"),
    ("e4m3", "fp16", "end"),
    ("e4m3", "bf16", "block"),
    ("e4m3", "fp16", "block"),
)
"""(weight, activation, scales) of every scheme that the linear kernels serve."""


def outputs(activation: str) -> tuple[str, ...]:
    """Types of output beside an activation: its own and float32; either 16-bit type where it was quantized."""
    return ("bf16", "fp16", "fp32") if activation == "e4m3" else (activation, "fp32")


def linear_kernels(
    shapes: Iterable[tuple[int, int]], tokens: Iterable[int], multiprocessors: Iterable[int], float32: bool = True
) -> Iterator[KernelSpec]:
    """The linear kernels for some problems; with float32 outputs or only 16-bit ones."""
    grid = list(itertools.product(shapes, tokens, multiprocessors))
    for weight, activation, scales in OPERANDS:
        for out in outputs(activation):
            if out == "fp32" and not float32:
                continue
            for (n, k), m, count in grid:
                config = plan_linear(LinearProblem(weight, activation, out, scales, m, n, k), count).config
                yield KernelSpec(f"linear_{config.loop}", config)


def quantize_kernels(
    widths: Iterable[int], tokens: Iterable[int], multiprocessors: Iterable[int], types: Iterable[str]
) -> Iterator[KernelSpec]:
    """The quantization kernels for activations of some widths."""
    for form, x, k, m, count in itertools.product(FORMATS, types, widths, tokens, multiprocessors):
        for layout in ("row", "k-major") if form == "fp8-group" else ("row",):
            for static in (False, True) if form == "fp8-tensor" else (False,):
                for launch in plan_quantize(form, x, m, k, count, layout=layout, static=static, aligned=k % 8 == 0):
                    yield KernelSpec("quantize", launch.config)


def everything() -> list[KernelSpec]:
    """All of them, once each."""
    shapes = linear_shapes()
    widths = sorted({k for _, k in shapes})
    return sorted(
        {
            *linear_kernels(shapes, TOKENS, MULTIPROCESSORS),
            *quantize_kernels(widths, TOKENS, MULTIPROCESSORS, ("bf16", "fp16")),
        },
        key=lambda spec: spec.name,
    )


def representative() -> list[KernelSpec]:
    """Those that serve the benchmarked layers on an RTX PRO 6000: each loop in each pair of operands."""
    widths = sorted({k for _, k in BENCHMARKED})
    return sorted(
        {
            *linear_kernels(BENCHMARKED, (1, 16, 64, 4096), (188,), float32=False),
            *quantize_kernels(widths, (1, 4096), (188,), ("bf16",)),
        },
        key=lambda spec: spec.name,
    )
