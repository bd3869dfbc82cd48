"""The environment variables of the conformance suite."""

from __future__ import annotations

from b12x_core.environment import Variable

CACHE = Variable(
    "B12X_CONFORMANCE_CACHE",
    "~/.cache/b12x-conformance",
    "Folder where generated checkpoints and reference results are kept.",
)
CPU = Variable(
    "B12X_CONFORMANCE_CPU",
    "0",
    "1 lets an engine run on a machine without a GPU, for conformance and the demo. Never set it for serving.",
)

VARIABLES: tuple[Variable, ...] = (CACHE, CPU)
"""Every variable that the conformance suite reads."""
