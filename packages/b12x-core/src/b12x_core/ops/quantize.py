"""Quantizing an activation by the rule of its format."""

from __future__ import annotations

import torch

from b12x_core import environment
from b12x_core.errors import ArgumentError
from b12x_core.formats import ALL, FORMATS, FP8_BLOCK, FP8_TENSOR, NVFP4, Element, Format, ScaleType
from b12x_core.ops import _checks
from b12x_core.ops._library import register
from b12x_core.ops._quantize_kernel import quantize_rows
from b12x_core.reference import quantize as reference
from b12x_core.reference.quantize import QuantizedTensor

ACTIVATION_FORMATS = {fmt.name: fmt for fmt in FORMATS if fmt.quantized and fmt != FP8_BLOCK}
_SCALE_DTYPE = {
    ScaleType.FP32: torch.float32,
    ScaleType.E4M3: torch.float8_e4m3fn,
    ScaleType.E8M0: torch.float8_e8m0fnu,
}


def _impl(x: torch.Tensor, fmt: str, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    q = reference.quantize(x, ACTIVATION_FORMATS[fmt], scale)
    # An op's result must not alias its argument; a static fp8-tensor scale comes back as it was given.
    return q.data, q.scale.clone() if scale is not None and q.scale.data_ptr() == scale.data_ptr() else q.scale


def _kernel(x: torch.Tensor, fmt: str, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if environment.REFERENCE.enabled():
        return _impl(x, fmt, scale)
    form = ACTIVATION_FORMATS[fmt]
    data, block_scale = _fake(x, fmt, scale)
    if not x.numel():
        if form.block == (ALL, ALL):
            block_scale.fill_(0.0) if scale is None else block_scale.copy_(scale)
        return data, block_scale
    codes, scales = quantize_rows(x.reshape(-1, x.shape[-1]), form, scale)
    if scale is not None and scales.data_ptr() == scale.data_ptr():
        scales = scale.clone()  # an op's result must not alias its argument
    return codes.contiguous().view(data.dtype).view(data.shape), scales.view(block_scale.dtype).view(block_scale.shape)


def _fake(x: torch.Tensor, fmt: str, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    form = ACTIVATION_FORMATS[fmt]
    k = x.shape[-1]
    dtype = torch.uint8 if form.element is Element.E2M1 else torch.float8_e4m3fn
    assert form.scale is not None
    assert form.block is not None
    if form.block == (ALL, ALL):
        shape: tuple[int, ...] = (1,)
    elif form.block[1] == ALL:
        shape = tuple(x.shape[:-1])
    else:
        shape = (*x.shape[:-1], -(-k // form.block[1]))
    return (
        x.new_empty((*x.shape[:-1], k // form.packed), dtype=dtype),
        x.new_empty(shape, dtype=_SCALE_DTYPE[form.scale]),
    )


_op = register("quantize(Tensor x, str format, Tensor? scale) -> (Tensor, Tensor)", _impl, _fake, kernel=_kernel)


def quantize(x: torch.Tensor, fmt: Format, *, scale: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize an activation along its last dimension. The rules stand in `b12x_core.reference.quantize`.

    Args:
        x: (..., K) bf16, fp16 or fp32.
        fmt: an activation format: fp8-tensor, fp8-row, fp8-group, mxfp8, mxfp4 or nvfp4.
        scale: float32 with one value: the static scale of fp8-tensor (None: dynamic) or the global scale that nvfp4
            requires, both what a stored value is multiplied with. None for every other format.

    Returns:
        data (..., K) e4m3 or (..., K/2) uint8; scale (1,), (...) or (..., ceil(K / block)) by the format.

    Raises:
        ArgumentError: an argument is malformed.
        UnsupportedError: nothing quantizes on x's device.
    """
    if fmt.name not in ACTIVATION_FORMATS:
        raise ArgumentError(f"quantize: fmt must be one of {', '.join(ACTIVATION_FORMATS)}; got {fmt}")
    dtypes = (*_checks.ACTIVATION_DTYPES, torch.float32)
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes or x.dim() < 1:
        raise _checks.fail("quantize", "x", f"a tensor of {_checks.names(dtypes)} with shape (..., K)", x)
    if x.shape[-1] % fmt.k_multiple:
        raise _checks.fail("quantize", "x", f"of a K that is a multiple of {fmt.k_multiple} for {fmt}", x)
    if fmt == NVFP4 or (scale is not None and fmt == FP8_TENSOR):
        scale = _checks.tensor_with_one_value("quantize", "scale", scale, x.device)
    elif scale is not None:
        raise _checks.fail("quantize", "scale", f"None for {fmt}, whose scales are dynamic", scale)
    data, block_scale = _op(x, fmt.name, scale)
    return QuantizedTensor(fmt, data, block_scale, scale if fmt == NVFP4 else None)
