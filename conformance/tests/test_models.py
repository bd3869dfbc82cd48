"""Whole models: an engine loads a checkpoint with every b12x flag set, and says what its dequantized weights say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from b12x_conformance import texts, truth
from b12x_conformance.cases.models import PROBLEMS, ModelProblem
from b12x_conformance.compare import match_text, perplexity
from b12x_core import B12xError, counters
from b12x_core.adapters import Adapter, Generation
from b12x_core.environment import FORCE_A16

# The argument is called `cache` in later versions of transformers, and there is no name that all versions know.
pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")]

each_model = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)


@dataclass(frozen=True)
class Run:
    """What an engine said, and which ops it said it with."""

    generations: list[Generation]
    scores: torch.Tensor
    counted: dict[str, counters.Count]


@functools.cache
def run(adapter: Adapter, problem: ModelProblem, device: str) -> Run | Exception:
    """Load a model once for all of its tests. A failure is kept too, since it would cost as much every time."""
    options = replace(problem.options, device=device)
    with pytest.MonkeyPatch.context() as patch:
        if problem.force_a16:
            patch.setenv(FORCE_A16.name, "1")
        try:
            engine = adapter.text_engine(str(problem.checkpoint()), options)
            counters.reset()
            try:
                generations = engine.generate(problem.prompts, problem.tokens)
                scores = torch.cat([torch.tensor(engine.score(passage)) for passage in problem.passages])
            finally:
                engine.close()
        except Exception as error:
            return error
    return Run(generations, scores, counters.snapshot())


@pytest.fixture
def result(
    adapter: Adapter,
    problem: ModelProblem,
    device: str,
    record_property: Callable[[str, str], None],
    pytestconfig: pytest.Config,
) -> Run:
    """The run of a problem by an adapter, its text written down for a comparison with other engines."""
    if not adapter.implements("b12x_text_engine"):
        pytest.skip(f"adapter {adapter.name} does not implement b12x_text_engine")
    reason = adapter.cannot_express(replace(problem.options, device=device), str(problem.checkpoint()))
    if reason is not None:
        pytest.skip(reason)
    outcome = run(adapter, problem, device)
    if isinstance(outcome, NotImplementedError) and not isinstance(outcome, B12xError) and device == "cpu":
        # The engine's own word. A refusal by b12x is a failure here, although its class is one of these too.
        pytest.skip(f"{adapter.info.engine} on a CPU: {outcome}")
    if isinstance(outcome, Exception):
        raise outcome
    record_property("served_by", ", ".join(outcome.counted))
    if report := pytestconfig.getoption("report", None):
        texts.save(Path(report), adapter.name, problem.id, outcome.generations)
    return outcome


def expected(problem: ModelProblem) -> truth.Measured:
    """What the truth says about a problem."""
    return truth.measure(
        problem.checkpoint(),
        problem.prompts,
        problem.tokens,
        problem.passages,
        kv_dtype=problem.options.kv_dtype,
        quantize_activations=not problem.force_a16,
    )


@each_model
def test_served_by(result: Run, problem: ModelProblem) -> None:
    """The checkpoint's scheme ran, and no other for the same kind of weight."""
    for key in problem.served:
        assert key in result.counted, f"{key} was never called; counted: {', '.join(result.counted) or 'nothing'}"
        op, _, scheme = key.partition("/")
        stored = scheme.split("-")[0]
        others = {other for other in result.counted if other.startswith(f"{op}/{stored}")} - {
            *problem.served,
            *problem.equivalent,
        }
        assert not others, f"beside {key}, {', '.join(others)} ran"


@each_model
def test_text(result: Run, problem: ModelProblem, record_error: Callable[[float, float], None]) -> None:
    """Greedy text equals the truth's, or parts from it at a near tie; until then both are about equally sure."""
    wanted = expected(problem).continuations
    differences = []
    matches = []
    for number, (continuation, generation) in enumerate(zip(wanted, result.generations, strict=True)):
        assert len(generation.token_ids) == problem.tokens
        match = match_text(number, continuation, generation.token_ids)
        matches.append(match)
        for step in range(match.matched):
            engine = generation.top_logprobs[step][generation.token_ids[step]]
            differences.append(abs(engine - float(continuation.logprobs[step, 0])))
    near_tie = problem.tolerance.near_tie
    if near_tie is not None:
        record_error(max(match.gap for match in matches), near_tie)
        if not all(match.agrees(near_tie) for match in matches):
            pytest.fail("\n".join([f"{problem.id}: near ties are below {near_tie}", *map(str, matches)]), pytrace=False)
    assert any(match.matched for match in matches), "\n".join(["no text begins as the truth's", *map(str, matches)])
    if differences:
        # A handful of tokens: their mean scatters about twice as much as that of a text.
        mean, bound = sum(differences) / len(differences), 2 * problem.tolerance.deviation
        assert mean < bound, f"log-probabilities of {len(differences)} equal tokens differ by {mean:.3f} on average"


@each_model
def test_perplexity(result: Run, problem: ModelProblem, record_error: Callable[[float, float], None]) -> None:
    """Every token of a text is about as likely as the truth says, and the whole of it even more nearly so."""
    wanted = expected(problem).scores
    assert len(result.scores) == len(wanted)
    deviation = float((result.scores - wanted).abs().mean())
    ratio = perplexity(result.scores) / perplexity(wanted)
    record_error(abs(ratio - 1), problem.tolerance.perplexity)
    facts = (
        f"perplexity {perplexity(result.scores):.4f}, truth {perplexity(wanted):.4f}, ratio {ratio:.4f}; "
        f"log-probabilities differ by {deviation:.4f} on average ({problem.tolerance.reason})"
    )
    assert abs(ratio - 1) < problem.tolerance.perplexity, facts
    assert deviation < problem.tolerance.deviation, facts
