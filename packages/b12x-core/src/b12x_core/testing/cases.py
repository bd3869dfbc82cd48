"""A test of a kernel on a GPU, and the data that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from b12x_core.planning.kernel import KernelSpec
from b12x_core.testing.bounds import Bound, error


class WrongResultError(AssertionError):
    """A test found a wrong result; the sentence has every parameter."""


@dataclass(frozen=True)
class Case:
    """One test.

    Attributes:
        kernel: the kernel it tests, under whose name it is reported.
        name: its parameters.
        run: raises on failure; returns what was reached of a bound, 0 for an exact result.
        specs: the kernels that it launches, so that they can be built beforehand.
    """

    kernel: str
    name: str
    run: Callable[[], float]
    specs: tuple[KernelSpec, ...] = ()


def within(actual: torch.Tensor, expected: torch.Tensor, limit: Bound, what: str) -> float:
    """Check a result against float64 truth; returns the error as a fraction of the bound."""
    found = error(actual, expected.cpu())
    if not found <= limit.value:
        raise WrongResultError(f"{what}: error {found:.3g} is beyond {limit.value:.3g} ({limit.reason})")
    return found / limit.value


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that two tensors are equal bit by bit, NaN included."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise WrongResultError(
            f"{what}: {actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        )
    a, e = (t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (actual, expected))
    if not torch.equal(a, e):
        wrong = (a != e).nonzero()
        raise WrongResultError(f"{what}: {len(wrong)} of {a.numel()} bytes differ, the first at {wrong[0].tolist()}")


def poison(device: torch.device) -> None:
    """Fill the memory that the next allocations will get with NaN."""
    held = [torch.full((1 << size,), float("nan"), device=device) for size in range(8, 25)]
    del held


@contextmanager
def busy_stream(device: torch.device) -> Iterator[None]:
    """Keep a second stream busy with matrix products meanwhile."""
    stream = torch.cuda.Stream(device)
    a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    stop = torch.cuda.Event()
    with torch.cuda.stream(stream):
        for _ in range(400):
            a = (a @ a).clamp_(-1, 1)
        stop.record()
    yield
    stop.synchronize()
