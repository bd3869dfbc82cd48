"""What dense and expert weights share when they are prepared: dtypes and shapes of storage, canonical scales."""

from __future__ import annotations

from typing import TypeVar

import torch

from b12x_core.errors import ArgumentError
from b12x_core.formats import ALL, Element, Format, ScaleType, Scheme
from b12x_core.ops import _checks

WEIGHT_DTYPE = {
    Element.E2M1: torch.uint8,
    Element.E4M3: torch.float8_e4m3fn,
    Element.BF16: torch.bfloat16,
    Element.FP16: torch.float16,
}
"""Dtype of a stored weight by the code of its elements."""


def check_weight(op: str, argument: str, weight: torch.Tensor, fmt: Format, dims: int, meaning: str) -> torch.Tensor:
    """Check a stored weight (..., rows, K / packed) of `dims` dimensions."""
    return _checks.tensor(op, argument, weight, (WEIGHT_DTYPE[fmt.element],), (None,) * dims, meaning)


def canonical_scale(
    op: str,
    argument: str,
    scale: torch.Tensor | None,
    fmt: Format,
    lead: tuple[int, ...],
    rows: int,
    k: int,
    parts: int = 1,
) -> torch.Tensor | None:
    """Block scales in the shape of `Format.scale_shape` after the leading dimensions, e8m0 as its torch dtype.

    A scale a tensor may be a scalar, a scale a row may carry a last dimension of 1; fp32 block scales may be stored
    as e8m0, whose values fp32 holds exactly. `parts` equal runs of rows each have blocks of their own.
    """
    if fmt.scale is None:
        if scale is not None:
            raise _checks.fail(op, argument, f"None for {fmt} weights", scale)
        return None
    if fmt.block == (ALL, ALL):
        shape = lead or (1,)
    else:
        first, *others = fmt.scale_shape(rows // parts, k)
        shape = (*lead, parts * first, *others)
    e8m0 = (torch.uint8, torch.float8_e8m0fnu)
    dtypes: tuple[torch.dtype, ...]
    if fmt.scale is ScaleType.E8M0:
        dtypes = e8m0
    elif fmt.scale is ScaleType.E4M3:
        dtypes = (torch.float8_e4m3fn,)
    else:
        dtypes = (torch.float32, *e8m0) if fmt.block == (128, 128) else (torch.float32,)
    expected = f"a tensor of {_checks.names(dtypes)} with shape {shape} for {fmt} weights"
    if not isinstance(scale, torch.Tensor) or scale.dtype not in dtypes:
        raise _checks.fail(op, argument, expected, scale)
    if scale.dtype in e8m0:
        scale = scale.view(torch.float8_e8m0fnu)
        scale = scale if fmt.scale is ScaleType.E8M0 else scale.float()
    trailing_one = fmt.block is not None and fmt.block[1] == ALL and tuple(scale.shape) == (*shape, 1)
    if tuple(scale.shape) != shape and not trailing_one and not (shape == (1,) and scale.numel() == 1):
        raise _checks.fail(op, argument, expected, scale)
    return scale.reshape(shape)


def check_scheme_scales(op: str, scheme: Scheme, name: str, global_scale: object, input_scale: object) -> None:
    """Check which of the two per-tensor scales a scheme takes; `name` prefixes the arguments' names."""
    if scheme.weight.global_scale != (global_scale is not None):
        expected = "given" if scheme.weight.global_scale else "None"
        raise _checks.fail(op, f"{name}global_scale", f"{expected} for {scheme}", global_scale)
    static = scheme.static_activation_scale
    if static is True and input_scale is None:
        raise _checks.fail(op, f"{name}input_scale", f"given for {scheme}, whose activations have a static scale", None)
    if static is False and input_scale is not None:
        raise _checks.fail(op, f"{name}input_scale", f"None for {scheme}", input_scale)


Prepared = TypeVar("Prepared")


def store_into(op: str, fresh: Prepared, into: Prepared | None) -> Prepared:
    """Copy the tensors of prepared weights into those of an earlier preparation, which keep their addresses.

    Raises:
        ArgumentError: the two do not hold the same tensors in the same shapes.
    """
    if into is None:
        return fresh
    for name, new in vars(fresh).items():
        old = getattr(into, name)
        if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and new.shape == old.shape:
            if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
                old.copy_(new)
        elif isinstance(new, torch.Tensor) or isinstance(old, torch.Tensor) or new != old:
            raise ArgumentError(
                f"{op}: into must hold weights of the same scheme and shapes; its {name} is {_checks.describe(old)}, "
                f"the new one {_checks.describe(new)}"
            )
    return into
