"""Linear layers: weights prepared once, then y = x W^T + b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from b12x_core import counters
from b12x_core.capabilities import REFERENCE_LINEAR, Support, supports_linear
from b12x_core.errors import UnsupportedError
from b12x_core.formats import FP8_BLOCK, FP8_ROW, NVFP4, SCHEMES, ScaleType, Scheme
from b12x_core.ops import _checks, _weights
from b12x_core.ops._library import eager, register
from b12x_core.ops._linear_kernel import linear_kernel, one, operands_on
from b12x_core.ops.block_packing import NV_FACTOR, pack_blocks, unpack_blocks
from b12x_core.ops.packing import pack_weight, unpack_weight
from b12x_core.planning.linear import TILE_ROWS
from b12x_core.reference.linear import linear as reference_linear

_OUTPUTS = (*_checks.ACTIVATION_DTYPES, torch.float32)
_ACTIVATIONS = {"bf16": (torch.bfloat16,), "fp16": (torch.float16,)}
"""What an unquantized scheme takes."""


@dataclass(frozen=True)
class LinearWeights:
    """Prepared weights of a linear layer; made by `prepare_linear`.

    Attributes:
        scheme: formats of weight and activation.
        n, k: output and input features.
        weight: what the reference reads, (N, K) as stored; or, where a kernel serves the layer, the tiles of
            `b12x_core.ops.packing` or `block_packing`.
        scale: scales as stored; beside tiles only those of blocks of 128 by 128.
        global_scale, bias: as given, None where there is none and beside tiles.
        input_scale: float32 (1,), the static scale of the activation, or None.
        affine: beside tiles, float32 (2, 64 * ceil(N / 64)): what a row's sum is multiplied with, and its bias.
    """

    scheme: Scheme
    n: int
    k: int
    weight: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    affine: torch.Tensor | None = None


def in_tiles(w: LinearWeights) -> LinearWeights:
    """Weights as the reference reads them -> as the kernels do."""
    fmt, read = w.scheme.weight, operands_on(w.scheme, w.weight.device)
    scale: torch.Tensor | float | None = w.scale
    by_block = fmt == FP8_BLOCK
    if read.scaled_tiles:
        assert w.scale is not None
        packed, scale = pack_blocks(
            w.weight,
            w.scale.view(torch.uint8),
            fmt,
            decoded=not read.block_scaled,
            split_nibbles=read.split_nibbles,
        )
        if w.global_scale is not None:
            scale = scale * w.global_scale
    else:
        packed = pack_weight(w.weight, widened=w.scheme.weight_only)
    affine = torch.zeros((2, packed.shape[0] * TILE_ROWS), dtype=torch.float32, device=packed.device)
    affine[0, : w.n] = 1.0 if scale is None or by_block else scale
    if w.bias is not None:
        affine[1, : w.n] = w.bias
    return LinearWeights(w.scheme, w.n, w.k, packed, w.scale if by_block else None, None, w.input_scale, None, affine)


def from_tiles(
    weight: torch.Tensor, affine: torch.Tensor, scale: torch.Tensor | None, scheme: Scheme, n: int, k: int
) -> LinearWeights:
    """The inverse of `in_tiles`: scales of a tensor and global scales come back as one a row, a bias as float32."""
    read = operands_on(scheme, weight.device)
    if read.scaled_tiles:
        return _from_scaled_tiles(weight, affine, scheme, n, k)
    dtype = _weights.WEIGHT_DTYPE[scheme.weight.element]
    plain = unpack_weight(weight, n, k, dtype, widened=scheme.weight_only)
    if scale is None and scheme.weight.quantized:
        scheme, scale = Scheme(FP8_ROW, scheme.activation), affine[0, :n]
    return LinearWeights(scheme, n, k, plain, scale, None, None, affine[1, :n])


def _from_scaled_tiles(weight: torch.Tensor, affine: torch.Tensor, scheme: Scheme, n: int, k: int) -> LinearWeights:
    """`from_tiles` where block scales lie in the tiles."""
    fmt, read = scheme.weight, operands_on(scheme, weight.device)
    row_scale = affine[0, :n]
    codes, stored = unpack_blocks(
        weight, row_scale, n, k, fmt, decoded=not read.block_scaled, split_nibbles=read.split_nibbles
    )
    global_scale = None
    if fmt == NVFP4:
        global_scale = row_scale if read.block_scaled else row_scale / NV_FACTOR
    scale = stored.view(torch.float8_e4m3fn if fmt.scale is ScaleType.E4M3 else torch.float8_e8m0fnu)
    plain = codes.view(_weights.WEIGHT_DTYPE[fmt.element])
    return LinearWeights(scheme, n, k, plain, scale, global_scale, None, affine[1, :n])


def prepare_linear(
    scheme: Scheme,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    global_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    into: LinearWeights | None = None,
) -> LinearWeights:
    """Prepare a linear layer's weights. The tensors are kept, not copied, where the kernel reads them as they are.

    Args:
        scheme: formats of weight and activation.
        weight: (N, K) bf16, fp16 or e4m3; (N, K/2) uint8 for e2m1, low nibble = even k. Any strides.
        scale: fp8-tensor: fp32, one value. fp8-channel: fp32 (N,) or (N, 1). fp8-block: fp32 or e8m0
            (ceil(N/128), ceil(K/128)). mxfp8, mxfp4: e8m0 (N, K/32). nvfp4: e4m3 (N, K/16). e8m0 is uint8 or
            float8_e8m0fnu. A weight is stored value * scale (* global_scale).
        global_scale: nvfp4: fp32, one value, or (N,) with one a row, as a fused layer of unequal shards needs.
        input_scale: fp32, one value: what a quantized activation is multiplied with. Required by nvfp4-w4a4 (the
            global scale of its activations), optional for fp8-tensor activations (None: dynamic), else None.
        bias: (N,) bf16, fp16 or fp32.
        into: earlier weights of the same scheme and shapes, whose storage is to be filled and which is returned.

    Raises:
        ArgumentError: an argument is malformed.
        UnsupportedError: nothing serves such a layer on the weight's device.
    """
    op = "prepare_linear"
    fmt = scheme.weight
    stored = _weights.check_weight(
        op, "weight", weight, fmt, 2, f"(N, K / {fmt.packed})" if fmt.packed > 1 else "(N, K)"
    )
    n, k = stored.shape[0], stored.shape[1] * fmt.packed
    support = supports_linear(scheme, n, k, stored.device)
    if not support.ok:
        raise UnsupportedError(f"{op}: {support.reason}")
    _weights.check_scheme_scales(op, scheme, "", global_scale, input_scale)
    canonical = _weights.canonical_scale(op, "scale", scale, fmt, (), n, k)
    for name, value in (("scale", canonical), ("bias", bias)):
        if isinstance(value, torch.Tensor) and value.device != stored.device:
            raise _checks.fail(op, name, f"on {stored.device} like the weight", value)
    if global_scale is not None:
        global_scale = _checks.scalar_or_rows(op, "global_scale", global_scale, (n,), "(N,)", stored.device)
    if input_scale is not None:
        input_scale = _checks.tensor_with_one_value(op, "input_scale", input_scale, stored.device)
    if bias is not None:
        _checks.tensor(op, "bias", bias, (*_checks.ACTIVATION_DTYPES, torch.float32), (n,), "(N,)")
    fresh = LinearWeights(scheme, n, k, stored, canonical, global_scale, input_scale, bias)
    if support.kernel != REFERENCE_LINEAR:
        fresh = in_tiles(fresh)
        one(stored.device)
    return _weights.store_into(op, fresh, into)


def _out_dtype(x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return x.dtype if out_dtype is None else out_dtype


def _impl(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    scale, global_scale, input_scale, bias, scheme, out_dtype = rest
    counters.record("linear", scheme, weight)
    y = reference_linear(
        x.flatten(0, -2), weight, scale, global_scale, input_scale, bias, SCHEMES[scheme], _out_dtype(x, out_dtype)
    )
    return y.view(*x.shape[:-1], weight.shape[0])


def _fake(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=_out_dtype(x, rest[-1]))


def _support(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Support:
    return supports_linear(SCHEMES[rest[-2]], weight.shape[0], x.shape[-1], x.device)


_op = register(
    "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? global_scale, Tensor? input_scale, Tensor? bias, "
    "str scheme, ScalarType? out_dtype) -> Tensor",
    _impl,
    _fake,
    support=_support,
)


def _tiles_impl(x: torch.Tensor, weight: torch.Tensor, affine: torch.Tensor, *rest: Any) -> torch.Tensor:
    scale, input_scale, scheme, n, out_dtype = rest
    w = from_tiles(weight, affine, scale, SCHEMES[scheme], n, x.shape[-1])
    counters.record("linear", scheme, weight)
    y = reference_linear(
        x.flatten(0, -2), w.weight, w.scale, w.global_scale, input_scale, w.bias, w.scheme, _out_dtype(x, out_dtype)
    )
    return y.view(*x.shape[:-1], n)


def _tiles_fake(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rest[-2]), dtype=_out_dtype(x, rest[-1]))


_tiles_op = register(
    "linear_tiles(Tensor x, Tensor weight, Tensor affine, Tensor? scale, Tensor? input_scale, str scheme, SymInt n, "
    "ScalarType? out_dtype) -> Tensor",
    _tiles_impl,
    _tiles_fake,
    kernel=linear_kernel,
)


def linear(x: torch.Tensor, w: LinearWeights, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Y = x W^T + b, with x quantized first where the scheme says so.

    Args:
        x: (..., K) bf16 or fp16, at least one dimension; any number of rows, 0 included.
        w: prepared weights. An unquantized scheme takes x of the weight's dtype.
        out_dtype: bf16, fp16 or fp32; None for x's dtype.

    Returns:
        (..., N) in out_dtype. Products are accumulated, and the bias added, in float32.

    Raises:
        ArgumentError: x is malformed.
        UnsupportedError: nothing serves the call on x's device.
    """
    dtypes = _ACTIVATIONS.get(w.scheme.name, _checks.ACTIVATION_DTYPES)
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes or x.dim() < 1 or x.shape[-1] != w.k:
        raise _checks.fail("linear", "x", f"a tensor of {_checks.names(dtypes)} with shape (..., {w.k}) = (..., K)", x)
    if x.device != w.weight.device:
        raise _checks.fail("linear", "x", f"on {w.weight.device} like the weights", x)
    if out_dtype is not None and out_dtype not in _OUTPUTS:
        raise _checks.fail("linear", "out_dtype", f"None, {_checks.names(_OUTPUTS)}", out_dtype)
    if x.dim() == 1:
        return linear(x.unsqueeze(0), w, out_dtype=out_dtype).squeeze(0)
    name = w.scheme.name
    y: torch.Tensor
    if w.affine is not None:
        call = linear_kernel if eager(x) else _tiles_op
        y = call(x, w.weight, w.affine, w.scale, w.input_scale, name, w.n, out_dtype)
    else:
        y = _op(x, w.weight, w.scale, w.global_scale, w.input_scale, w.bias, name, out_dtype)
    return y
