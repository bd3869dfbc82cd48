"""Attention layers: the engine's own layer with its own KV cache, against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import b12x_core
import pytest
import torch
from b12x_conformance.cases.attention import PROBLEMS, STALE, AttentionProblem, Step
from b12x_conformance.verdict import Verdict
from b12x_core.adapters import Adapter, AttentionLayer
from b12x_core.testing.bounds import bound

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL_POOL = 65536
"""Tokens of a pool that is filled with stale values first. A larger one would need gigabytes of them."""


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_attention(
    adapter: Adapter,
    problem: AttentionProblem,
    device: str,
    expressible: Callable[..., None],
    served: Callable[[str], set[str]],
    verdict: Verdict,
) -> None:
    case = problem.case(device)
    expressible("b12x_attention_layer", case)
    layer = adapter.attention_layer(case)
    fill_with_stale_values(layer, problem, device)
    table = Buffer(device)
    for number, step in enumerate(problem.steps()):
        layer.write(step.k.to(device), step.v.to(device), step.slots.to(device))
        out = layer.run(
            step.q.to(device), table.hold(step.block_table), step.seq_lens.to(device), step.query_start_loc.to(device)
        )
        assert out.dtype == problem.dtype
        expected = step.expected().out
        if problem.exact:
            verdict.equal(f"step {number}", out, expected)
        else:
            verdict.within(f"step {number}", out, expected, problem.bound())
    assert served("paged_attention") == {problem.kv_name}
    assert served("write_kv_cache") == {problem.kv_name}
    verdict.conclude()


class Buffer:
    """A tensor that keeps its address while its content changes, as an engine's block table does between steps."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._held: torch.Tensor | None = None

    def hold(self, values: torch.Tensor) -> torch.Tensor:
        """`values` in the same storage as before, where the shape is the same."""
        if self._held is None or self._held.shape != values.shape:
            self._held = values.to(self._device).clone()
        else:
            self._held.copy_(values)
        return self._held


def fill_with_stale_values(layer: AttentionLayer, problem: AttentionProblem, device: str) -> None:
    """Write large values to every slot."""
    slots = problem.pages * problem.page_size
    if slots > SMALL_POOL:
        return
    k, v = (
        torch.full((slots, problem.num_kv_heads, size), STALE, dtype=problem.dtype, device=device)
        for size in (problem.head_dim, problem.v_size)
    )
    layer.write(k, v, torch.arange(slots, device=device))


LSE_PROBLEMS = [
    problem
    for problem in PROBLEMS
    if problem.id.startswith(("kind-26", "kind-30", "kind-32-soft-cap", "kind-28-past-the-window-page-16"))
]


@pytest.mark.parametrize("problem", LSE_PROBLEMS, ids=lambda problem: problem.id)
def test_log_sum_exp(adapter: Adapter, problem: AttentionProblem, device: str, verdict: Verdict) -> None:
    if adapter.name != "core":
        pytest.skip(f"an attention layer of {adapter.info.engine} does not return the log-sum-exp")
    for number, step in enumerate(problem.steps()):
        out, lse = attend_with_lse(problem, step, device)
        expected = step.expected()
        seen = expected.lse.isfinite()
        assert torch.equal(lse.isfinite().cpu(), seen), f"step {number}: -inf elsewhere"
        assert bool((lse.cpu()[~seen] == -torch.inf).all())
        assert bool((out.cpu()[~seen] == 0).all())
        verdict.within(f"LSE of step {number}", lse.cpu()[seen], expected.lse[seen], bound("lse", torch.float32))
    verdict.conclude()


def attend_with_lse(problem: AttentionProblem, step: Step, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The op itself, on a cache of its own."""
    kv = problem.dtype if problem.kv_dtype == "auto" else torch.float8_e4m3fn
    shape = (problem.pages, problem.page_size, problem.num_kv_heads)
    k_cache, v_cache = (
        torch.zeros(*shape, size, dtype=kv, device=device) for size in (problem.head_dim, problem.v_size)
    )
    scales = {
        "k_scale": torch.tensor(problem.k_scale, device=device),
        "v_scale": torch.tensor(problem.v_scale, device=device),
    }
    k, v, slots = (tensor.to(device) for tensor in (step.k, step.v, step.slots))
    b12x_core.write_kv_cache(k, v, k_cache, v_cache, slots, **scales)
    sinks = None if problem.sinks is None else problem.sinks(problem.num_heads).to(device)
    result = b12x_core.paged_attention(
        step.q.to(device),
        k_cache,
        v_cache,
        step.block_table.to(device),
        step.seq_lens.to(device),
        step.query_start_loc.to(device),
        scale=problem.scale,
        window=problem.window,
        soft_cap=problem.soft_cap,
        sinks=sinks,
        return_lse=True,
        **scales,
    )
    assert isinstance(result, tuple)
    return result
