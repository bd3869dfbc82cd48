"""Linear layers: the engine's own layer, loaded by its own loader, against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from b12x_conformance.cases.linear import PROBLEMS, LinearProblem
from b12x_conformance.verdict import Verdict
from b12x_core.adapters import Adapter

pytestmark = pytest.mark.usefixtures("one_thread")

CPU_REPEATS = 20
"""A race needs threads; without a GPU the repetition only shows that nothing depends on earlier calls."""


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_linear(
    adapter: Adapter,
    problem: LinearProblem,
    device: str,
    expressible: Callable[..., None],
    served: Callable[[str], set[str]],
    verdict: Verdict,
) -> None:
    sample = problem.build(device)
    expressible("b12x_linear_layer", sample.case)
    layer = adapter.linear_layer(sample.case)
    for m in problem.tokens:
        x = sample.input(m)
        with busy_stream(device, problem.repeats > 1):
            y = layer(x.to(device))
            for turn in range(1, problem.repeats if device == "cuda" else min(problem.repeats, CPU_REPEATS)):
                again = layer(x.to(device))
                assert torch.equal(again, y), f"M={m}: call {turn} differs from the first"
        schemes = served("linear")
        assert len(schemes) == 1, f"served by linear in {schemes or 'no scheme'}"
        scheme = schemes.pop()
        allowed = problem.schemes
        assert scheme in allowed, f"M={m}: served in {scheme}"
        assert y.dtype == problem.dtype
        expected = sample.expected(x, scheme)
        if problem.exact:
            verdict.equal(f"M={m}", y, expected)
        else:
            verdict.within(f"M={m}", y, expected, sample.bound())
    verdict.conclude()


@contextmanager
def busy_stream(device: str, busy: bool) -> Iterator[None]:
    """Keep a second stream of a GPU busy with work of other sizes, so that blocks start and end at odd times."""
    if not busy or device != "cuda":
        yield
        return
    other = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=device)
    with torch.cuda.stream(other):
        for _ in range(500):
            a = (a @ a).clamp(-1, 1)
    yield
    torch.cuda.synchronize()
