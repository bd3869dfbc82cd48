"""Mixture-of-experts layers: the engine's own layer, loaded by its own loader, against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from b12x_conformance.cases.moe import PROBLEMS, MoEProblem
from b12x_conformance.verdict import Verdict
from b12x_core.adapters import Adapter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_moe(
    adapter: Adapter,
    problem: MoEProblem,
    device: str,
    expressible: Callable[..., None],
    served: Callable[[str], set[str]],
    verdict: Verdict,
) -> None:
    sample = problem.build(device)
    expressible("b12x_moe_layer", sample.case)
    layer = adapter.moe_layer(sample.case)
    for m in problem.tokens:
        x, routes = sample.input(m), sample.routes(m)
        y = layer(x.to(device), *(tensor.to(device) for tensor in routes))
        if m == 0:
            assert y.shape == (0, problem.hidden), f"shape {tuple(y.shape)}"
            continue
        schemes = served("fused_moe")
        assert len(schemes) == 1, f"served by fused_moe in {schemes or 'no scheme'}"
        scheme = schemes.pop()
        allowed = problem.schemes
        assert scheme in allowed, f"M={m}: served in {scheme}"
        assert y.dtype == problem.dtype
        expected = sample.expected(x, routes, scheme)
        if problem.exact:
            verdict.equal(f"M={m}", y, expected)
        else:
            verdict.within(f"M={m}", y, expected, sample.bound(scheme))
    verdict.conclude()
