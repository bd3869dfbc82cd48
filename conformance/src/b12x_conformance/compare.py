"""Comparing a model's text and perplexity with the truth.

Two right implementations round differently, so greedy texts may part where two tokens are nearly equally likely, and
have nothing in common from there on. A text therefore counts as right up to its first difference, and a difference
counts as a near tie if the truth itself sees almost no difference between the two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from b12x_conformance.truth import Continuation

NEAR_TIE = 0.05
"""Largest gap, in the truth's logits, between its own token and another one that counts as a tie."""


@dataclass(frozen=True)
class TextMatch:
    """How far a greedy text agrees with the truth.

    Attributes:
        prompt: number of the prompt.
        length: tokens compared.
        matched: tokens before the first difference, `length` if there is none.
        expected, got: the truth's and the engine's token there, None if there is no difference.
        gap: what the truth's logits say about the two; 0 if there is no difference.
    """

    prompt: int
    length: int
    matched: int
    expected: int | None = None
    got: int | None = None
    gap: float = 0.0

    def agrees(self, near_tie: float = NEAR_TIE) -> bool:
        """Whether the texts are equal, or part at a near tie."""
        return self.gap < near_tie

    def __str__(self) -> str:
        if self.matched == self.length:
            return f"prompt {self.prompt}: all {self.length} tokens equal"
        return (
            f"prompt {self.prompt}: {self.matched} of {self.length} tokens equal, then token {self.got} instead of "
            f"{self.expected}, which the truth puts {self.gap:.4f} higher"
        )


def match_text(prompt: int, truth: Continuation, tokens: Sequence[int]) -> TextMatch:
    """Compare the first tokens of a continuation, as many as both have."""
    length = min(len(truth.tokens), len(tokens))
    for step in range(length):
        expected, got = int(truth.tokens[step]), tokens[step]
        if expected != got:
            return TextMatch(prompt, length, step, expected, got, truth.gap(step, got))
    return TextMatch(prompt, length, length)


def perplexity(scores: Iterable[float] | torch.Tensor) -> float:
    """The exponential of the mean negative log-probability."""
    return math.exp(-torch.as_tensor(scores if isinstance(scores, torch.Tensor) else list(scores)).double().mean())
