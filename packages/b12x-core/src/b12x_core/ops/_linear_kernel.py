"""The linear op on a GPU: the activation is quantized where the scheme says so, then one matrix kernel runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from b12x_core import runtime
from b12x_core.counters import record
from b12x_core.formats import FP8_BLOCK, SCHEMES, Scheme
from b12x_core.ops._quantize_kernel import (
    DTYPE_NAMES,
    ROW_BYTES,
    Quantization,
    aligned,
    quantization,
    quantize_specs,
)
from b12x_core.ops._scratch import Piece, Pieces, take
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear_plan import LinearPlan, LinearProblem, plan_linear
from b12x_core.runtime.devices import facts
from b12x_core.runtime.loader import Launch


@dataclass(frozen=True, eq=False)
class Call:
    """What stays the same between calls of one shape.

    Attributes:
        kernel: name of the configuration.
        launch: the kernel.
        ctas: as in `LinearPlan`.
        blocks: whether scales are applied by blocks.
        quantize: what quantizes the activation first, None for 16 bits.
        scratch: for sums that are split; and for the codes, scales and partial maxima of a quantized activation.
        one: float32 (1,) of 1, the scale of an activation that has none.
    """

    kernel: str
    launch: Launch
    ctas: int
    blocks: bool
    quantize: Quantization | None
    scratch: Pieces
    one: torch.Tensor


def problem(scheme: Scheme, x_dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int) -> LinearProblem:
    """The problem that `planning` is asked about."""
    name = DTYPE_NAMES[x_dtype]
    return LinearProblem(
        weight="e4m3" if scheme.weight.quantized else name,
        activation="e4m3" if scheme.activation.quantized else name,
        out=DTYPE_NAMES[out_dtype],
        scales="block" if by_blocks(scheme) else "end",
        m=m,
        n=n,
        k=k,
    )


def kernels_for(
    scheme: Scheme, x_dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int, multiprocessors: int
) -> list[KernelSpec]:
    """The kernels that a call launches on a GPU of so many multiprocessors, the product first."""
    plan = plan_linear(problem(scheme, x_dtype, out_dtype, m, n, k), multiprocessors)
    found = [linear_spec(plan)]
    if scheme.activation.quantized:
        for static in (False, True) if scheme.static_activation_scale is None else (False,):
            found += quantize_specs(
                x_dtype, scheme.activation, m, k, multiprocessors, static=static, k_major=by_blocks(scheme)
            )
    return found


def linear_spec(plan: LinearPlan) -> KernelSpec:
    """The kernel of a plan."""
    return KernelSpec(f"linear_{plan.config.loop}", plan.config)


def by_blocks(scheme: Scheme) -> bool:
    """Whether scales are applied by blocks, within the loop."""
    return scheme.weight == FP8_BLOCK


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
        along: whether the rows of the activation are `aligned`; matters to what quantizes it.
        static: whether the activation's scale is given.

    Raises:
        FrozenError: a kernel is not there, and compiling is not allowed now.
    """
    form = SCHEMES[scheme]
    gpu = facts(device)
    plan = plan_linear(
        problem(form, x_dtype, out_dtype, m, n, k), gpu.multiprocessors, gpu.multiprocessor_shared_memory
    )
    pieces = [Piece((max(plan.workspace, 1),), torch.float32)]
    quantize = None
    if form.activation.quantized:
        quantize = quantization(form.activation, x_dtype, m, k, device, along, static, by_blocks(form))
        pieces += [quantize.codes, quantize.scales, quantize.partial]
    return Call(
        plan.config.name,
        runtime.get(linear_spec(plan), device),
        plan.ctas,
        by_blocks(form),
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
        rows: (M, K), each starting at a multiple of 16 bytes: uint8 for e4m3, else bf16 or fp16.
        x_scale: float32: (1,), for all rows; (M,); or by blocks (ceil(K / 128), at least M).
        weight, affine, scale: as in `LinearWeights`.
        y: (M, N), written.
        call: what `call_for` gave for the shape.
        workspace, counters: scratch.
    """
    m, n = y.shape
    if not call.blocks:
        stride = 1 if x_scale.shape[0] == m else 0
        call.launch(rows, weight, affine, x_scale, y, workspace, counters, m, n, k, stride, call.ctas)
        return
    blocks = (scale,) if call.quantize is None else (scale, x_scale)
    call.launch(rows, weight, affine, call.one, y, workspace, counters, *blocks, m, n, k, 0, call.ctas)


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
    along = aligned(rows)
    static = input_scale is not None
    call = call_for(scheme, x.dtype, y.dtype, m, n, k, device, along, static)
    out = y if y.dim() == 2 else y.view(m, n)
    if call.quantize is None:
        counters, workspace = take(call.scratch, device)
        if not along:
            rows = _copy_aligned(rows)
        multiply(rows, call.one, weight, affine, scale, out, call, k, workspace, counters)
        return y
    counters, workspace, codes, scales, partial = take(call.scratch, device)
    if static:
        scales = input_scale
    call.quantize(rows, codes, scales, None, partial)
    multiply(codes, scales, weight, affine, scale, out, call, k, workspace, counters)
    return y
