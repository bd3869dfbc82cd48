"""Linear layers: weights prepared once, then y = x W^T + b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from b12x_core import counters
from b12x_core.capabilities import Support, supports_linear
from b12x_core.errors import UnsupportedError
from b12x_core.formats import SCHEMES, Scheme
from b12x_core.ops import _checks, _weights
from b12x_core.ops._library import register
from b12x_core.reference.linear import linear as reference_linear


@dataclass(frozen=True)
class LinearWeights:
    """Prepared weights of a linear layer; made by `prepare_linear`.

    Attributes:
        scheme: formats of weight and activation.
        n, k: output and input features.
        weight, scale, global_scale, input_scale, bias: tensors that the op reads, None where the scheme has none.
    """

    scheme: Scheme
    n: int
    k: int
    weight: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None


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
    return _weights.store_into(op, fresh, into)


def _impl(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    scale, global_scale, input_scale, bias, scheme = rest
    counters.record("linear", scheme, weight)
    y = reference_linear(x.flatten(0, -2), weight, scale, global_scale, input_scale, bias, SCHEMES[scheme])
    return y.view(*x.shape[:-1], weight.shape[0])


def _fake(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _support(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Support:
    return supports_linear(SCHEMES[rest[-1]], weight.shape[0], x.shape[-1], x.device)


_op = register(
    "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? global_scale, Tensor? input_scale, Tensor? bias, "
    "str scheme) -> Tensor",
    _impl,
    _fake,
    _support,
)


def linear(x: torch.Tensor, w: LinearWeights) -> torch.Tensor:
    """Y = x W^T + b, with x quantized first where the scheme says so.

    Args:
        x: (..., K) bf16 or fp16, at least one dimension; any number of rows, 0 included.
        w: prepared weights. An unquantized scheme takes x of the weight's dtype.

    Returns:
        (..., N) in x's dtype. Products are accumulated, and the bias added, in float32.

    Raises:
        ArgumentError: x is malformed.
        UnsupportedError: nothing serves the call on x's device.
    """
    dtypes = _checks.ACTIVATION_DTYPES if w.scheme.weight.quantized else (w.weight.dtype,)
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes or x.dim() < 1 or x.shape[-1] != w.k:
        raise _checks.fail("linear", "x", f"a tensor of {_checks.names(dtypes)} with shape (..., {w.k}) = (..., K)", x)
    if x.device != w.weight.device:
        raise _checks.fail("linear", "x", f"on {w.weight.device} like the weights", x)
    if x.dim() == 1:
        return linear(x.unsqueeze(0), w).squeeze(0)
    y: torch.Tensor = _op(x, w.weight, w.scale, w.global_scale, w.input_scale, w.bias, w.scheme.name)
    return y
