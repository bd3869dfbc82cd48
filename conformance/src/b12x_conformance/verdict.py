"""Comparing what a layer returned with the truth, and saying where it is off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from b12x_core.testing.bounds import Bound, error


class Verdict:
    """Collects the outputs of one test that are off, so that a failure shows all of them at once."""

    def __init__(self, record: Callable[[float, float], None]) -> None:
        self._record = record
        self._off: list[str] = []

    def within(self, what: str, actual: torch.Tensor, expected: torch.Tensor, bound: Bound) -> None:
        """Compare with float64 `expected`, within a bound."""
        found = error(actual, expected)
        self._record(found, bound.value)
        if not found <= bound.value:
            self._off.append(f"{what}: error {found:.3g} beyond the bound {bound.value:.3g} ({bound.reason})")
            self._off.append(_where(actual, expected))

    def equal(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare with float64 `expected` rounded to the dtype of `actual`."""
        rounded = expected.float().to(actual.dtype).double()
        found = error(actual, rounded)
        self._record(found, 0.0)
        if found != 0:
            self._off += [f"{what}: not equal to the rounded truth", _where(actual, rounded)]

    def conclude(self) -> None:
        """Fail if any comparison was off."""
        if self._off:
            pytest.fail("\n".join(self._off), pytrace=False)


def _where(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """The element that is off the most, and how many are."""
    if actual.shape != expected.shape:
        return f"  shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    a, e = actual.detach().cpu().double(), expected.double()
    off = (a - e).abs().nan_to_num(torch.inf)
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    return f"  worst at {place}: {a[place].item():.7g} instead of {e[place].item():.7g}; {int(a.isnan().sum())} NaN"
