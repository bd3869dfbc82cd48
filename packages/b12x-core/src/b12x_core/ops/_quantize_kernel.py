"""Quantization of an activation on a GPU, in the layouts that the matrix kernels read."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from b12x_core import runtime
from b12x_core.formats import ALL, FP8_TENSOR, Format, ScaleType
from b12x_core.ops._scratch import Piece
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.quantize import PARTIALS
from b12x_core.planning.quantize_plan import QuantizeLaunch, plan_quantize
from b12x_core.runtime.devices import facts
from b12x_core.runtime.loader import Launch

ROW_BYTES = 16
"""Rows of codes start at multiples of this, as the copy engine needs them."""

COLUMNS = 4
"""Rows of scales by blocks of K are padded to a multiple of this many tokens, which makes 16 bytes."""

TILE_TOKENS = 8
"""Scales by tiles of K are padded to a multiple of this many tokens: the least that a matrix instruction takes."""

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Dtypes as planning names them."""


def _plan(
    fmt: Format, dtype: torch.dtype, m: int, k: int, multiprocessors: int, aligned: bool, static: bool, layout: str
) -> list[QuantizeLaunch]:
    return plan_quantize(
        fmt.name,
        DTYPE_NAMES[dtype],
        m,
        k,
        multiprocessors,
        aligned=aligned,
        layout=layout,
        static=static and fmt == FP8_TENSOR,
    )


def quantize_specs(
    dtype: torch.dtype,
    fmt: Format,
    m: int,
    k: int,
    multiprocessors: int,
    *,
    static: bool = False,
    layout: str = "row",
) -> list[KernelSpec]:
    """The kernels that `quantize_rows` launches for rows that lie 16 bytes apart or not."""
    choices = (True, False) if k % 8 == 0 else (False,)
    return [
        KernelSpec("quantize", launch.config)
        for aligned in choices
        for launch in _plan(fmt, dtype, m, k, multiprocessors, aligned, static, layout)
    ]


@dataclass(frozen=True)
class Quantization:
    """What stays the same between calls of one shape.

    Attributes:
        steps: of each launch the function, the names of its arguments, and the number of parts.
        codes, scales, partial: what it writes.
    """

    steps: tuple[tuple[Launch, tuple[str, ...], int], ...]
    codes: Piece
    scales: Piece
    partial: Piece

    def __call__(self, x: torch.Tensor, codes: Any, scales: Any, given: torch.Tensor | None, partial: Any) -> None:
        """Launch. x (M, K); `given`: the global scale of nvfp4."""
        for launch, names, ctas in self.steps:
            if names == ("x", "q", "scale"):
                launch(x, codes, scales)
            else:
                values = {"x": x, "q": codes, "scale": scales, "given": given, "partial": partial, "ctas": ctas}
                launch(*[values[name] for name in names])


def rows_aligned(x: torch.Tensor) -> bool:
    """Whether the rows of (M, K) start at multiples of `ROW_BYTES`."""
    return (x.data_ptr() | (x.stride(0) * x.itemsize)) % ROW_BYTES == 0


def aligned(x: torch.Tensor) -> bool:
    """Whether a thread that quantizes can load 16 bytes at a time: aligned rows of a multiple of 8 elements."""
    return rows_aligned(x) and x.shape[1] % 8 == 0


@functools.lru_cache(maxsize=16384)
def quantization(
    fmt: Format,
    dtype: torch.dtype,
    m: int,
    k: int,
    device: torch.device,
    along: bool,
    static: bool,
    layout: str = "row",
) -> Quantization:
    """Plan a shape and load its kernels.

    Args:
        fmt: an activation format.
        dtype: of x.
        m, k: shape of x, at least 1.
        device: of x.
        along: `aligned(x)`.
        static: whether the scale of fp8-tensor is given.
        layout: what is written, as in `QuantizeConfig`.

    Raises:
        FrozenError: a kernel is not there, and compiling is not allowed now.
    """
    steps = tuple(
        (runtime.get(KernelSpec("quantize", launch.config), device), launch.config.arguments, launch.ctas)
        for launch in _plan(fmt, dtype, m, k, facts(device).multiprocessors, along, static, layout)
    )
    partial = Piece((PARTIALS if len(steps) > 1 else 0,), torch.float32)
    return Quantization(steps, _codes(fmt, m, k, layout), _scales(fmt, m, k, layout), partial)


def _codes(fmt: Format, m: int, k: int, layout: str) -> Piece:
    """Where codes or values go."""
    if layout == "values":
        return Piece((m, -(-k * 2 // ROW_BYTES) * ROW_BYTES // 2), torch.bfloat16)
    return Piece((m, -(-k // (fmt.packed * ROW_BYTES)) * ROW_BYTES), torch.uint8)


def _scales(fmt: Format, m: int, k: int, layout: str) -> Piece:
    """Where the scales go."""
    assert fmt.block is not None
    dtype = torch.float32 if fmt.scale is ScaleType.FP32 else torch.uint8
    if fmt.block[1] == ALL:
        return Piece((1 if fmt.block[0] == ALL else m,), dtype)
    blocks = -(-k // fmt.block[1])
    if layout == "values":
        return Piece((0,), dtype)
    if layout == "k-major":
        return Piece((blocks, -(-m // COLUMNS) * COLUMNS), dtype)
    if layout.startswith("tiles"):
        tile = int(layout.removeprefix("tiles"))
        return Piece((-(-k // tile), -(-m // TILE_TOKENS) * TILE_TOKENS, tile // fmt.block[1]), dtype)
    return Piece((m, blocks), dtype)


def quantize_rows(
    x: torch.Tensor, fmt: Format, scale: torch.Tensor | None, *, layout: str = "row"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows by the rule of a format.

    Args:
        x: (M, K) bf16, fp16 or fp32, M and K at least 1.
        fmt: an activation format.
        scale: float32 (1,): the static scale of fp8-tensor or the global scale of nvfp4.
        layout: what is written, as in `QuantizeConfig`.

    Returns:
        codes: uint8 (M, bytes of a row), whose rows start at multiples of `ROW_BYTES`; or bf16 (M, K) of "values".
        scales: (1,) or (M,) float32. Of blocks, float32 or uint8 that holds e4m3 or e8m0: (M, blocks); k-major (blocks,
            M rounded up to `COLUMNS`); by tiles (tiles, M rounded up to `TILE_TOKENS`, blocks of a tile); none of
            "values".
    """
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    static = scale is not None and fmt == FP8_TENSOR
    run = quantization(fmt, x.dtype, m, k, x.device, aligned(x), static, layout)
    codes, scales, partial = (
        torch.empty(piece.shape, dtype=piece.dtype, device=x.device) for piece in (run.codes, run.scales, run.partial)
    )
    if static and scale is not None:
        scales = scale
    run(x, codes, scales, scale, partial)
    return codes[:, : k if layout == "values" else k // fmt.packed], scales
