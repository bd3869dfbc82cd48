"""The linear op on a GPU: the activation is quantized where the scheme says so, then one matrix kernel runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from b12x_core import runtime
from b12x_core.counters import record
from b12x_core.formats import FP8_ROW, NVFP4, SCHEMES, Scheme
from b12x_core.ops._quantize_kernel import (
    DTYPE_NAMES,
    ROW_BYTES,
    Quantization,
    aligned,
    quantization,
    quantize_specs,
    rows_aligned,
)
from b12x_core.ops._scratch import Piece, Pieces, take
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear_operands import Operands, operands
from b12x_core.planning.linear_plan import LinearPlan, LinearProblem, plan_linear
from b12x_core.runtime.devices import DeviceFacts, facts
from b12x_core.runtime.loader import Launch


@dataclass(frozen=True, eq=False)
class Call:
    """What stays the same between calls of one shape.

    Attributes:
        kernel: name of the configuration.
        launch: the kernel.
        ctas: as in `LinearPlan`.
        operands: what it reads.
        token_scale: what scales tokens at the end: "" for nothing, "tensor", "row", or "given", the input scale.
        quantize: what quantizes the activation first, None for 16 bits.
        scratch: for sums that are split; and for the codes, scales and partial maxima of a quantized activation.
        one: float32 (1,) of 1, the scale of an activation that has none.
    """

    kernel: str
    launch: Launch
    ctas: int
    operands: Operands
    token_scale: str
    quantize: Quantization | None
    scratch: Pieces
    one: torch.Tensor


def operands_on(scheme: Scheme, device: torch.device) -> Operands:
    """What kernels read on a device, and how `prepare_linear` lays weights out for them. On a CPU the portable form."""
    return operands(scheme, facts(device).arch if device.type == "cuda" else "")


def problem(
    scheme: Scheme, x_dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int, arch: str
) -> LinearProblem:
    """The problem that `planning` is asked about."""
    name, read = DTYPE_NAMES[x_dtype], operands(scheme, arch)
    weight = read.weight if scheme.weight.quantized else name
    return LinearProblem(weight, read.activation or name, DTYPE_NAMES[out_dtype], read.scales, m, n, k)


def kernels_for(
    scheme: Scheme, x_dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int, gpu: DeviceFacts
) -> list[KernelSpec]:
    """The kernels that a call launches on a GPU, the product first."""
    plan = plan_linear(problem(scheme, x_dtype, out_dtype, m, n, k, gpu.arch), gpu.multiprocessors)
    found = [linear_spec(plan)]
    layout = operands(scheme, gpu.arch).layout
    if layout:
        for static in (False, True) if scheme.static_activation_scale is None else (False,):
            found += quantize_specs(x_dtype, scheme.activation, m, k, gpu.multiprocessors, static=static, layout=layout)
    return found


def linear_spec(plan: LinearPlan) -> KernelSpec:
    """The kernel of a plan."""
    return KernelSpec(f"linear_{plan.config.loop}", plan.config)


def _token_scale(scheme: Scheme, read: Operands) -> str:
    """`Call.token_scale`: scales of tokens that are neither in the values nor read in the loop."""
    if not read.layout or read.scales == "block":
        return ""
    if read.scaled_tiles:
        return {NVFP4: "given", FP8_ROW: "row"}.get(scheme.activation, "")
    return "row" if scheme.activation == FP8_ROW else "tensor"


@functools.cache
def one(device: torch.device) -> torch.Tensor:
    """The scale (1,) of what has none. `prepare_linear` makes it first: memory of a recorded graph would not last."""
    return torch.ones(1, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=16384)
def call_for(
    scheme: str,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    device: torch.device,
    along: bool = True,
    static: bool = False,
) -> Call:
    """Plan a shape and load its kernels.

    Args:
        scheme: its name.
        x_dtype, out_dtype: of activation and output.
        m, n, k: at least 1.
        device: of all tensors.
        along: whether the activation is `aligned`; matters to what quantizes it.
        static: whether the activation's scale is given.

    Raises:
        FrozenError: a kernel is not there, and compiling is not allowed now.
    """
    form = SCHEMES[scheme]
    gpu = facts(device)
    read = operands(form, gpu.arch)
    plan = plan_linear(
        problem(form, x_dtype, out_dtype, m, n, k, gpu.arch), gpu.multiprocessors, gpu.multiprocessor_shared_memory
    )
    pieces = [Piece((max(plan.workspace, 1),), torch.float32)]
    quantize = None
    if read.layout:
        quantize = quantization(form.activation, x_dtype, m, k, device, along, static, read.layout)
        pieces += [quantize.codes, quantize.scales, quantize.partial]
    return Call(
        plan.config.name,
        runtime.get(linear_spec(plan), device),
        plan.ctas,
        read,
        _token_scale(form, read),
        quantize,
        Pieces(tuple(pieces)),
        one(device),
    )


def _copy_aligned(x: torch.Tensor) -> torch.Tensor:
    """(M, K) with rows that start at multiples of 16 bytes, as the copy engine needs them."""
    m, k = x.shape
    padded = x.new_empty((m, -(-k * x.itemsize // ROW_BYTES) * ROW_BYTES // x.itemsize))
    padded[:, :k] = x
    return padded[:, :k]


def multiply(
    rows: Any,
    x_scale: Any,
    given: torch.Tensor | None,
    weight: torch.Tensor,
    affine: torch.Tensor,
    scale: torch.Tensor | None,
    y: torch.Tensor,
    call: Call,
    k: int,
    workspace: Any,
    counters: Any,
) -> None:
    """The matrix product alone, from an activation that is as the kernel reads it.

    Args:
        rows: (M, K), each starting at a multiple of 16 bytes: uint8 for codes, else bf16 or fp16.
        x_scale: what quantizing wrote: float32 (1,), for all rows; (M,); by blocks (ceil(K / 128), at least M); or
            uint8 by tiles. Not read where tokens have no scale but `given`.
        given: float32 (1,), the static scale of an nvfp4 activation.
        weight, affine, scale: as in `LinearWeights`.
        y: (M, N), written.
        call: what `call_for` gave for the shape.
        workspace, counters: scratch.
    """
    m, n = y.shape
    kind, read = call.token_scale, call.operands
    col = x_scale if kind in ("row", "tensor") else given if kind == "given" else call.one
    stride = 1 if kind == "row" else 0
    blocks: tuple[Any, ...] = ()
    if read.scales == "block":
        blocks = (scale, x_scale) if read.layout else (scale,)
    elif read.block_scaled:
        blocks = (x_scale,)
    call.launch(rows, weight, affine, col, y, workspace, counters, *blocks, m, n, k, stride, call.ctas)


def linear_kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    affine: torch.Tensor,
    scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    scheme: str,
    n: int,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """`linear_tiles` by a kernel. Arguments as in `LinearWeights`."""
    record("linear", scheme, weight)
    device, k = x.device, x.shape[-1]
    y = torch.empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype, device=device)
    m = y.numel() // n
    if m == 0:
        return y
    rows = x if x.dim() == 2 else x.reshape(m, k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    static = input_scale is not None
    call = call_for(scheme, x.dtype, y.dtype, m, n, k, device, aligned(rows), static)
    out = y if y.dim() == 2 else y.view(m, n)
    if call.quantize is None:
        counters, workspace = take(call.scratch, device)
        if not rows_aligned(rows):
            rows = _copy_aligned(rows)
        multiply(rows, None, None, weight, affine, scale, out, call, k, workspace, counters)
        return y
    counters, workspace, codes, scales, partial = take(call.scratch, device)
    if static and call.token_scale == "tensor":
        scales = input_scale
    call.quantize(rows, codes, scales, input_scale, partial)
    multiply(codes, scales, input_scale, weight, affine, scale, out, call, k, workspace, counters)
    return y
