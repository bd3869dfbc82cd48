"""Greedy texts of several engines side by side: what each said, kept in the results, and where two of them part.

Each engine runs in an environment of its own, so one run writes its texts down and a later one compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from b12x_core.adapters import Generation

_FILE = "texts-{}.json"

Texts = dict[str, list[Generation]]
"""Generations by problem, one a prompt."""


def save(folder: Path, adapter: str, problem: str, generations: Iterable[Generation]) -> None:
    """Add an adapter's generations for a problem to its file in a folder of results."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE.format(adapter)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[problem] = [
        {"tokens": generation.token_ids, "top_logprobs": generation.top_logprobs} for generation in generations
    ]
    path.write_text(json.dumps(kept) + "\n")


def read(folder: Path) -> dict[str, Texts]:
    """The texts of every adapter that wrote some to a folder or one below it, by adapter."""
    found: dict[str, Texts] = {}
    for path in sorted(folder.rglob(_FILE.format("*"))):
        adapter = path.stem.removeprefix(_FILE.partition("{")[0])
        found[adapter] = {
            problem: [
                Generation(
                    tuple(prompt["tokens"]),
                    tuple({int(token): value for token, value in step.items()} for step in prompt["top_logprobs"]),
                )
                for prompt in prompts
            ]
            for problem, prompts in json.loads(path.read_text()).items()
        }
    return found


@dataclass(frozen=True)
class Parting:
    """How far two engines' greedy continuations of one prompt agree.

    Attributes:
        matched: tokens before the first difference; all, if there is none.
        length: tokens compared.
        tokens: what the one and the other went on with, None if there is no difference.
        gap: how much surer of its own token than of the other's an engine was, the surer of the two; 0 if there is no
            difference.
    """

    matched: int
    length: int
    tokens: tuple[int, int] | None = None
    gap: float = 0.0

    def __str__(self) -> str:
        if self.tokens is None:
            return f"all {self.length} tokens equal"
        return f"{self.matched} of {self.length} tokens equal, then {self.tokens} at a gap of {self.gap:.4f}"


def part(one: Generation, other: Generation) -> Parting:
    """Compare two continuations of the same prompt."""
    length = min(len(one.token_ids), len(other.token_ids))
    for step, tokens in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if tokens[0] != tokens[1]:
            gaps = (
                _gap(one.top_logprobs[step], tokens[0], tokens[1]),
                _gap(other.top_logprobs[step], tokens[1], tokens[0]),
            )
            return Parting(step, length, tokens, max(gaps))
    return Parting(length, length)


def _gap(logprobs: Mapping[int, float], chosen: int, rejected: int) -> float:
    """How much likelier an engine found its own token; without bound if the other was not among its likeliest."""
    return logprobs[chosen] - logprobs[rejected] if rejected in logprobs else math.inf
