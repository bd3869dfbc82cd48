"""Every kernel that planning can choose for the models of `b12x_core.planning.models`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from b12x_core.formats import SCHEMES
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear import SCALE_BLOCK, LinearConfig
from b12x_core.planning.linear_operands import BLOCK_SCALED, operands
from b12x_core.planning.linear_plan import LinearProblem, plan_linear
from b12x_core.planning.models import BENCHMARKED, MULTIPROCESSORS, TOKENS, linear_shapes
from b12x_core.planning.quantize import FORMATS
from b12x_core.planning.quantize_plan import layouts, plan_quantize

ARCHITECTURES = ("sm_90a", "sm_120a")
"""One for each set of kernels that planning can choose."""


def linear_operands(arch: str) -> list[tuple[str, str, str]]:
    """(weight, activation, scales) of every scheme on an architecture."""
    found: dict[tuple[str, str, str], None] = {}
    for scheme in SCHEMES.values():
        read = operands(scheme, arch)
        given = ("bf16", "fp16") if scheme.weight.quantized else (read.weight,)
        for activation in (read.activation,) if read.activation else given:
            found[read.weight, activation, read.scales] = None
    return list(found)


def outputs(scales: str, activation: str) -> tuple[str, ...]:
    """Types of output beside what is multiplied: its own and float32; either 16-bit type where x was quantized."""
    rounded = scales in SCALE_BLOCK and activation == "bf16"
    return ("bf16", "fp16", "fp32") if rounded or activation in ("e4m3", "e2m1") else (activation, "fp32")


def linear_kernels(
    shapes: Iterable[tuple[int, int]],
    tokens: Iterable[int],
    multiprocessors: Iterable[int],
    arch: str,
    every_output: bool = True,
) -> Iterator[KernelSpec]:
    """The linear kernels for some problems on an architecture, with each type of output or the usual one."""
    grid = list(itertools.product(shapes, tokens, multiprocessors))
    for weight, activation, scales in linear_operands(arch):
        for out in outputs(scales, activation)[: None if every_output else 1]:
            for (n, k), m, count in grid:
                config = plan_linear(LinearProblem(weight, activation, out, scales, m, n, k), count).config
                yield KernelSpec(f"linear_{config.loop}", config)


def runs_on(spec: KernelSpec, arch: str) -> bool:
    """Whether an architecture has the instructions of a kernel."""
    config = spec.config
    return not (isinstance(config, LinearConfig) and config.block_scaled) or arch in BLOCK_SCALED


def quantize_kernels(
    widths: Iterable[int],
    tokens: Iterable[int],
    multiprocessors: Iterable[int],
    types: Iterable[str],
    views: bool = True,
) -> Iterator[KernelSpec]:
    """The quantization kernels for activations of some widths, and for `views` that are not aligned.

    Rows that are not aligned although K would let them be are views into wider ones: rare, so what has no other use
    than in front of a matrix kernel with block scales is not listed for them.
    """
    for form, x, k, m, count in itertools.product(FORMATS, types, widths, tokens, multiprocessors):
        for layout in layouts(form):
            whole, listed = k % 8 == 0, layout in ("row", "k-major")
            choices = itertools.product(
                (False, True) if form == "fp8-tensor" else (False,),
                (True, False) if whole and listed and views else (whole,),
            )
            for static, aligned in choices:
                for launch in plan_quantize(form, x, m, k, count, layout=layout, static=static, aligned=aligned):
                    yield KernelSpec("quantize", launch.config)


def everything(arch: str | None = None) -> list[KernelSpec]:
    """All of them, once each, by name: for an architecture or, without one, for any."""
    shapes = linear_shapes()
    widths = sorted({k for _, k in shapes})
    return _sorted(
        itertools.chain(
            *(linear_kernels(shapes, TOKENS, MULTIPROCESSORS, target) for target in _targets(arch)),
            quantize_kernels(widths, TOKENS, MULTIPROCESSORS, ("bf16", "fp16")),
        )
    )


def representative(arch: str | None = None) -> list[KernelSpec]:
    """Those that serve the benchmarked layers on an RTX PRO 6000: each loop in each set of operands."""
    widths = sorted({k for _, k in BENCHMARKED})
    return _sorted(
        itertools.chain(
            *(linear_kernels(BENCHMARKED, (1, 16, 64, 4096), (188,), target, False) for target in _targets(arch)),
            quantize_kernels(widths, (1, 4096), (188,), ("bf16",), views=False),
            quantize_kernels(widths[:1], (1,), (188,), ("bf16",)),
        )
    )


def _targets(arch: str | None) -> tuple[str, ...]:
    return ARCHITECTURES if arch is None else (arch,)


def _sorted(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    return sorted(set(specs), key=lambda spec: spec.name)
