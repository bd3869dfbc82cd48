"""Texts of engines side by side: what is kept of a run, and where two of them part."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from b12x_conformance import texts
from b12x_core.adapters import Generation


def said(*steps: dict[int, float]) -> Generation:
    """A greedy continuation: at each step the likeliest of the candidates."""
    return Generation(tuple(max(step, key=step.__getitem__) for step in steps), steps)


SAME = {1: -0.1, 2: -3.0}


def test_texts_survive_writing_and_reading(tmp_path: Path) -> None:
    first, second = said(SAME), said(SAME, {7: -0.5})
    texts.save(tmp_path / "a", "vllm", "dense", [first])
    texts.save(tmp_path / "a", "vllm", "moe", [second, first])
    texts.save(tmp_path / "b", "sglang", "dense", [second])
    assert texts.read(tmp_path) == {
        "vllm": {"dense": [first], "moe": [second, first]},
        "sglang": {"dense": [second]},
    }


def test_equal_texts_have_no_gap() -> None:
    assert texts.part(said(SAME, SAME), said(SAME, SAME)) == texts.Parting(2, 2)


@pytest.mark.parametrize(
    ("one", "other", "gap"),
    [
        ({1: -0.70, 2: -0.72}, {2: -0.69, 1: -0.73}, 0.04),  # both hardly saw a difference: the surer one counts
        ({1: -0.1, 2: -2.1}, {2: -0.69, 1: -0.70}, 2.0),  # one was sure
        ({1: -0.1, 3: -2.1}, {2: -0.69, 1: -0.70}, math.inf),  # one did not even think of it
    ],
    ids=["near tie", "one is sure", "unthought of"],
)
def test_the_surer_engine_decides_whether_it_is_a_tie(
    one: dict[int, float], other: dict[int, float], gap: float
) -> None:
    parting = texts.part(said(SAME, one, SAME), said(SAME, other, SAME))
    assert (parting.matched, parting.length, parting.tokens) == (1, 3, (1, 2))
    assert parting.gap == pytest.approx(gap)
