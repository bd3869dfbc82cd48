"""The environment variables of the core: one table, read when they are needed so that tests can change them."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: its name.
        default: what it is when unset, as text; "" for unset.
        meaning: one sentence for the documentation.
    """

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        """The value now."""
        return os.environ.get(self.name, self.default)

    def enabled(self) -> bool:
        """Whether the value now is anything but empty or 0."""
        return self.get() not in ("", "0")


REFERENCE = Variable(
    "B12X_REFERENCE", "0", "1 runs the plain torch reference on every device, for finding faults. Slow on a GPU."
)
FORCE_A16 = Variable(
    "B12X_FORCE_A16",
    "0",
    "1 serves checkpoints with quantized activations as their 16-bit-activation form (W4A16, W8A16).",
)
STATS = Variable(
    "B12X_STATS", "", "A folder: every process writes the calls it made to each op to PID.json there while it runs."
)
CACHE_DIR = Variable(
    "B12X_CACHE_DIR",
    "~/.cache/b12x",
    "Where compiled kernels are: a folder, or several separated by a colon. All are searched in that order; the first "
    "that can be written gets what is compiled.",
)

VARIABLES: tuple[Variable, ...] = (REFERENCE, FORCE_A16, STATS, CACHE_DIR)
"""Every variable that the core reads."""
