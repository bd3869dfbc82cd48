"""Two engines give the same greedy text for a checkpoint, or part at a near tie."""

from __future__ import annotations

import pytest
from b12x_conformance import texts
from b12x_conformance.cases.models import PROBLEMS

BY_ID = {problem.id: problem for problem in PROBLEMS}


def test_texts_agree(found: dict[str, texts.Texts], problem: str, one: str, other: str) -> None:
    partings = [texts.part(*pair) for pair in zip(found[one][problem], found[other][problem], strict=True)]
    bound = BY_ID[problem].tolerance.parting
    if bound is None:
        pytest.skip(f"{BY_ID[problem].tolerance.reason}: two right texts need not agree")
    if max(parting.gap for parting in partings) >= bound:
        lines = [f"prompt {number}: {parting}" for number, parting in enumerate(partings)]
        pytest.fail("\n".join([f"{one} and {other}, near ties are below {bound}", *lines]), pytrace=False)
