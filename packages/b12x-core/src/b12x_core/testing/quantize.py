"""Tests of the quantization kernels: equal to the reference bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from b12x_core.formats import FP8_GROUP, FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, Format
from b12x_core.ops._quantize_kernel import quantize_rows, quantize_specs
from b12x_core.ops.quantize import quantize
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.quantize_plan import layouts
from b12x_core.reference import quantize as reference
from b12x_core.reference.codecs import decode_fp8
from b12x_core.runtime.devices import facts
from b12x_core.testing.cases import Case, equal, poison

FORMATS = (FP8_TENSOR, FP8_ROW, FP8_GROUP, MXFP8, MXFP4, NVFP4)
SHAPES = (
    *((0, 64), (1, 16), (1, 17408), (3, 160), (7, 100), (33, 576), (5, 2880), (2, 17), (300, 1024), (4, 40000)),
    *((7, 32), (16, 5120), (33, 17408), (8, 8192), (16, 17408)),
)
UNALIGNED = ((1, 16), (7, 160), (33, 2880))
"""Shapes whose rows could lie 16 bytes apart, and do not."""


def inputs(m: int, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values over the whole range of the dtype: rows of many sizes, zeros of both signs, subnormals, the largest."""
    x = torch.randn(m, k, device=device) * torch.exp2(torch.randint(-24, 12, (m, 1), device=device).float())
    x = x * torch.exp2(torch.randint(-3, 3, (m, k), device=device).float())
    x[torch.rand(m, k, device=device) < 0.05] = 0.0
    x[torch.rand(m, k, device=device) < 0.05] = -0.0
    x = x.to(dtype)
    if m > 1:
        x[0] = 0
    if m > 2:
        x[1, : k // 2] = torch.finfo(dtype).tiny / 4
        x[2, 0] = torch.finfo(dtype).max
    return x


def scale_for(fmt: Format, x: torch.Tensor, static: bool) -> torch.Tensor | None:
    """A static scale where the format takes one."""
    if fmt == NVFP4 or (fmt == FP8_TENSOR and static):
        amax = x.float().abs().amax() if x.numel() else torch.ones((), device=x.device)
        return (amax / (6 * 448 if fmt == NVFP4 else 500)).reshape(1)
    return None


def compare(x: torch.Tensor, fmt: Format, scale: torch.Tensor | None, what: str) -> None:
    """The public op, and what matrix kernels read, against the reference."""
    expected = reference.quantize(x, fmt, scale)
    poison(x.device)
    q = quantize(x, fmt, scale=scale)
    equal(q.data, expected.data, f"{what}: elements")
    equal(q.scale, expected.scale.view_as(q.scale), f"{what}: scales")
    for layout in written(fmt, x.dtype) if x.shape[0] else ():
        compare_layout(x, fmt, scale, layout, expected, f"{what} {layout}")


def written(fmt: Format, dtype: torch.dtype) -> tuple[str, ...]:
    """The layouts that matrix kernels read; their activations have 16 bits."""
    return tuple(layout for layout in layouts(fmt.name) if layout != "row" and dtype.itemsize == 2)


def compare_layout(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None,
    layout: str,
    expected: reference.QuantizedTensor,
    what: str,
) -> None:
    """One layout against the reference, and what follows K in its rows against 0."""
    m = x.shape[0]
    poison(x.device)
    data, scales = quantize_rows(x, fmt, scale, layout=layout)
    whole = data.as_strided((m, data.stride(0)), (data.stride(0), 1))
    equal(whole[:, data.shape[1] :], torch.zeros_like(whole[:, data.shape[1] :]), f"{what}: beyond K")
    if layout == "values":
        codes, by = expected.data, expected.scale.view(m, -1)
        values = decode_fp8(codes) if fmt == FP8_ROW else reference.dequantize(codes, fmt, by)
        equal(one_nan(data), one_nan(values.bfloat16()), f"{what}: values")
        if fmt == FP8_ROW:
            equal(scales, expected.scale, f"{what}: scales")
        return
    equal(data.view(expected.data.dtype), expected.data, f"{what}: elements")
    by = expected.scale
    if layout == "k-major":
        equal(scales[:, :m].t(), by, f"{what}: scales")
    else:
        by = torch.nn.functional.pad(by.view(torch.uint8), (0, -by.shape[1] % scales.shape[2]))
        equal(scales[:, :m], by.view(m, -1, scales.shape[2]).transpose(0, 1), f"{what}: scales")


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """Values with all NaN alike: their bits are not the format's business."""
    return torch.where(values.isnan(), torch.full_like(values, float("nan")), values)


def run_values(
    fmt: Format, m: int, k: int, dtype: torch.dtype, device: torch.device, static: bool, before: int = 8
) -> float:
    """Values of every size, in rows that lie apart in memory full of NaN and start `before` elements into it."""
    around = torch.full((m + 2, k + 16), float("nan"), device=device, dtype=dtype)
    x = around[1 : m + 1, before : before + k]
    x.copy_(inputs(m, k, dtype, device))
    compare(x, fmt, scale_for(fmt, x, static), f"{fmt} M={m} K={k} {dtype} static={static} before={before}")
    return 0.0


def run_special(fmt: Format, special: float, dtype: torch.dtype, device: torch.device) -> float:
    """A NaN or an infinity in one row."""
    x = torch.randn(4, 320, device=device, dtype=dtype)
    x[1, 37] = special
    compare(x, fmt, torch.ones(1, device=device) if fmt == NVFP4 else None, f"{fmt} with {special} {dtype}")
    return 0.0


def tie_values(fmt: Format, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(1, K): values on and beside every tie between two codes; each block has the largest code, so a scale of 1."""
    largest = fmt.element.largest
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    grid = codes.view(torch.float8_e4m3fn).float().nan_to_num(0)
    if largest == 6:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    grid = grid.abs().unique()
    middle = (grid[1:] + grid[:-1]) / 2
    values = torch.cat([grid, middle, middle * (1 + 2**-7), middle * (1 - 2**-7)])
    values = torch.cat([values, -values])
    width = fmt.block[1] if fmt.block and fmt.block[1] else 128
    rows = torch.nn.functional.pad(values, (0, -values.numel() % (width - 1))).view(-1, width - 1)
    return torch.nn.functional.pad(rows, (1, 0), value=largest).flatten().view(1, -1).to(dtype)


def run_ties(fmt: Format, dtype: torch.dtype, device: torch.device) -> float:
    """Rounding to nearest even."""
    x = tie_values(fmt, dtype, device)
    compare(x, fmt, torch.ones(1, device=device) if fmt == NVFP4 else None, f"{fmt} ties {dtype}")
    return 0.0


def kernels(
    fmt: Format, dtype: torch.dtype, m: int, k: int, static: bool, device: torch.device
) -> tuple[KernelSpec, ...]:
    """What a case launches."""
    count = facts(device).multiprocessors
    return tuple(
        spec
        for layout in ("row", *written(fmt, dtype))
        for spec in quantize_specs(dtype, fmt, m, k, count, static=static, layout=layout)
        if m
    )


def cases(device: torch.device) -> Iterator[Case]:
    """All of them."""
    for fmt in FORMATS:
        kernel = f"quantize {fmt}"
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for static in (False, True) if fmt == FP8_TENSOR else (False,):
                shapes = SHAPES if dtype.itemsize == 2 else SHAPES[2:5]
                for m, k, before in (*((m, k, 8) for m, k in shapes), *((m, k, 3) for m, k in UNALIGNED)):
                    if k % fmt.k_multiple == 0:
                        run = partial(run_values, fmt, m, k, dtype, device, static, before)
                        name = f"M={m} K={k} {dtype} static={static} before={before}"
                        yield Case(kernel, name, run, kernels(fmt, dtype, m, k, static, device))
            specs = kernels(fmt, dtype, 4, 320, False, device)
            for special in (float("nan"), float("inf"), float("-inf")):
                yield Case(kernel, f"{special} {dtype}", partial(run_special, fmt, special, dtype, device), specs)
            x = tie_values(fmt, dtype, torch.device("cpu"))
            specs = kernels(fmt, dtype, 1, x.shape[1], False, device)
            yield Case(kernel, f"ties {dtype}", partial(run_ties, fmt, dtype, device), specs)
