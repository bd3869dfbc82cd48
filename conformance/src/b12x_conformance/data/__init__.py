"""Fixed English text, and prompts: what models are measured and compared on. Both were written for this suite."""

from __future__ import annotations

import importlib.resources

PROMPTS = (
    "What is gravity?",
    "What is the water cycle?",
    "Name the months of the year in order.",
    "What is the difference between weather and climate?",
    "What causes the tides of the sea?",
)
"""Five questions, to be put through the chat template.

Of 26 that were tried, these meet the fewest near ties in the greedy answers of the models that the suite compares by
text: where a model hesitates between two words, a right engine may say the other one, and nothing is learnt from it.
"""


def text() -> str:
    """About 3,700 tokens of plain English prose."""
    return importlib.resources.files(__name__).joinpath("lighthouse.txt").read_text(encoding="utf-8")
