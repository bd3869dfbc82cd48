"""Checks of arguments. Each raises `ArgumentError` with one sentence: which argument, what was expected, what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from b12x_core.errors import ArgumentError

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)


def describe(value: object) -> str:
    """A value in a sentence: a tensor by dtype, shape and device, anything else by its repr."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
    return repr(value)


def fail(op: str, argument: str, expected: str, value: object) -> ArgumentError:
    """The error to raise."""
    return ArgumentError(f"{op}: {argument} must be {expected}; got {describe(value)}")


def names(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes in a sentence."""
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(
    op: str,
    argument: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    meaning: str = "",
    device: torch.device | None = None,
) -> torch.Tensor:
    """Check dtype, shape (None: any size) and device of a tensor, and return it.

    The sentence is put together only when it is needed: this runs at every call of an op, and under tracing.
    """
    if (
        isinstance(value, torch.Tensor)
        and value.dtype in dtypes
        and value.dim() == len(shape)
        and all(want is None or want == have for want, have in zip(shape, value.shape, strict=True))
    ):
        if device is None or value.device == device:
            return value
        raise fail(op, argument, f"on {device} like the other tensors", value)
    sizes = ", ".join("*" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "")
    named = f" = {meaning}" if meaning else ""
    raise fail(op, argument, f"a tensor of {names(dtypes)} with shape ({sizes}){named}", value)


def scalar_or_rows(
    op: str, argument: str, value: object, rows: Sequence[int], meaning: str, device: torch.device
) -> torch.Tensor:
    """Check a float32 tensor that holds one value or a value for each of `rows` (a shape)."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.device != device:
        raise fail(op, argument, f"a tensor of float32 on {device}", value)
    if value.numel() != 1 and tuple(value.shape) != tuple(rows):
        raise fail(op, argument, f"of one value or of shape {tuple(rows)} = {meaning}", value)
    return value


def tensor_with_one_value(op: str, argument: str, value: object, device: torch.device) -> torch.Tensor:
    """Check a float32 tensor that holds one value, and return it with shape (1,)."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.numel() != 1:
        raise fail(op, argument, "a tensor of float32 with one value", value)
    if value.device != device:
        raise fail(op, argument, f"on {device} like the other tensors", value)
    return value.reshape(1)


def positive(op: str, argument: str, value: float | None) -> None:
    """Check that a number, if given, is positive and finite."""
    if value is not None and not 0.0 < value < float("inf"):
        raise fail(op, argument, "positive and finite", value)
