"""Tests of the quantization kernels: equal to the reference bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from b12x_core.formats import FP8_GROUP, FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, Format
from b12x_core.ops._quantize_kernel import quantize_rows, quantize_specs
from b12x_core.ops.quantize import quantize
from b12x_core.planning.kernel import KernelSpec
from b12x_core.reference import quantize as reference
from b12x_core.runtime.devices import facts
from b12x_core.testing.cases import Case, equal, poison

FORMATS = (FP8_TENSOR, FP8_ROW, FP8_GROUP, MXFP8, MXFP4, NVFP4)
SHAPES = ((0, 64), (1, 16), (1, 17408), (3, 160), (7, 100), (33, 576), (5, 2880), (2, 17), (300, 1024), (4, 40000))


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
    """The public op, and the layout that matrix kernels read, against the reference."""
    expected = reference.quantize(x, fmt, scale)
    poison(x.device)
    q = quantize(x, fmt, scale=scale)
    equal(q.data, expected.data, f"{what}: elements")
    equal(q.scale, expected.scale.view_as(q.scale), f"{what}: scales")
    if fmt == FP8_GROUP and x.shape[0]:
        data, columns = quantize_rows(x, fmt, None, k_major=True)
        equal(data.view(torch.float8_e4m3fn), expected.data, f"{what}: elements beside scales by column")
        equal(columns[:, : x.shape[0]].t(), expected.scale, f"{what}: scales by column")


def run_values(fmt: Format, m: int, k: int, dtype: torch.dtype, device: torch.device, static: bool) -> float:
    """Values of every size, in rows that lie apart in memory full of NaN."""
    around = torch.full((m + 2, k + 16), float("nan"), device=device, dtype=dtype)
    x = around[1 : m + 1, 8 : 8 + k]
    x.copy_(inputs(m, k, dtype, device))
    compare(x, fmt, scale_for(fmt, x, static), f"{fmt} M={m} K={k} {dtype} static={static}")
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
    layouts = (False, True) if fmt == FP8_GROUP else (False,)
    count = facts(device).multiprocessors
    return tuple(
        spec for by in layouts for spec in quantize_specs(dtype, fmt, m, k, count, static=static, k_major=by) if m
    )


def cases(device: torch.device) -> Iterator[Case]:
    """All of them."""
    for fmt in FORMATS:
        kernel = f"quantize {fmt}"
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for static in (False, True) if fmt == FP8_TENSOR else (False,):
                for m, k in SHAPES if dtype.itemsize == 2 else SHAPES[2:5]:
                    if k % fmt.k_multiple == 0:
                        run = partial(run_values, fmt, m, k, dtype, device, static)
                        name = f"M={m} K={k} {dtype} static={static}"
                        yield Case(kernel, name, run, kernels(fmt, dtype, m, k, static, device))
            specs = kernels(fmt, dtype, 4, 320, False, device)
            for special in (float("nan"), float("inf"), float("-inf")):
                yield Case(kernel, f"{special} {dtype}", partial(run_special, fmt, special, dtype, device), specs)
            x = tie_values(fmt, dtype, torch.device("cpu"))
            specs = kernels(fmt, dtype, 1, x.shape[1], False, device)
            yield Case(kernel, f"ties {dtype}", partial(run_ties, fmt, dtype, device), specs)
