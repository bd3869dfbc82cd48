"""How far a result may be from the truth: one metric, and one table with a bound and its reason for each recipe.

The truth is float64 from stored bytes, quantized activations included, so what a bound pays for is small: rounding of
the output, the order of a float32 sum, and for two chained GEMMs the few intermediate values that round the other way.
It never pays for quantization itself. Where the data allow it (one-hot inputs, scales of few bits), no bound is used
and bytes must be equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bound:
    """A bound of `error` and the reason for it."""

    value: float
    reason: str


_EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""The most that one rounding to a dtype changes a value, relative to it."""

_ROUNDING = "one rounding to the output dtype; what `error` adds to the denominator leaves room for float32 sums"
_SUM = _ROUNDING + ", and 2^-18 for float32 outputs, of sums whose terms a matrix unit aligns and truncates"
_FLIPS = "an intermediate that lies at a tie in float32 may round the other way: one step of {step} of its block"

_TABLE: dict[str, tuple[float, str]] = {
    "linear": (2.0**-18, _SUM),
    "attention": (0.0, _ROUNDING),
    "lse": (1e-5, "a float32 sum of exponentials of float32 scores"),
    "moe/16-bit": (0.0, _ROUNDING),
    "moe/8-bit": (0.025, _FLIPS.format(step="1/16 of an e4m3 value")),
    "moe/4-bit": (0.05, _FLIPS.format(step="1/3 of the largest e2m1 value")),
}
"""Recipe -> what is added to one rounding to the output dtype, and why."""


def bound(recipe: str, dtype: torch.dtype) -> Bound:
    """The bound of a recipe for outputs of `dtype`."""
    extra, reason = _TABLE[recipe]
    return Bound(_EPSILON[dtype] + extra, reason)


def moe_recipe(rule: str) -> str:
    """The recipe of a mixture of experts whose activations follow `rule`."""
    if rule == "none":
        return "moe/16-bit"
    return "moe/4-bit" if rule in ("mxfp4", "nvfp4") else "moe/8-bit"


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst element of |actual - expected| / (|expected| + rms of its row); inf for a NaN or a wrong shape.

    The first term of the denominator makes rounding of the output count the same for every element, the second keeps
    elements that cancelled to almost nothing from dominating. A row is the last dimension: rows may differ in size by
    orders of magnitude, and none may hide behind another.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    a, e = actual.detach().cpu().double(), expected.double()
    rms = e.square().mean(-1, keepdim=True).sqrt()
    off = (a - e).abs()
    # A row of zeros must be zeros: any difference at all is infinite there.
    worst = torch.where(off == 0, 0.0, off / (e.abs() + rms)).max().item()
    return math.inf if math.isnan(worst) else worst
