"""A group of instructions with the inputs that they are tried on and the checks of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from b12x_conformance.emulation.definitions import Words

Check = Callable[[Words, Words], str]
"""(inputs (trials, 32, n_in), results (trials, 32, n_out)) -> how far off; raises AssertionError."""


@dataclass(frozen=True)
class Probe:
    """Instructions that share inputs.

    Attributes:
        name: of the case.
        snippets: PTX, see `probe_kernel.compile`, each with what checks its results.
        inputs: makes (trials, 32, n_in).
        n_out: results of a snippet.
        addresses: whether snippets take the addresses of inputs and results too.
    """

    name: str
    snippets: tuple[tuple[str, Check], ...]
    inputs: Callable[[np.random.Generator], Words]
    n_out: int
    addresses: bool = False

    def data(self) -> Words:
        """The inputs, the same every time."""
        return self.inputs(np.random.default_rng(list(self.name.encode())))

    def compile(self) -> Any:
        """The kernel for CUTE_DSL_ARCH, compiled."""
        from b12x_conformance.emulation import probe_kernel

        snippets = tuple(snippet for snippet, _ in self.snippets)
        return probe_kernel.compile(snippets, self.data().shape[-1], self.n_out, self.addresses)

    def verify(self, results: Words) -> str:
        """Compare results (trials, snippets, 32, n_out); raises AssertionError with the first snippet that is off."""
        data, said = self.data(), set()
        for place, (snippet, check) in enumerate(self.snippets):
            try:
                said.add(check(data, results[:, place]))
            except AssertionError as error:
                raise AssertionError(f"{self.name}: {snippet}\n{error}") from None
        return max(said)


def equal(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> str:
    """Check that all words are equal; raises AssertionError with the first that is not."""
    off = found != expected
    if off.any():
        place = tuple(int(i) for i in np.argwhere(off)[0])
        raise AssertionError(f"{off.sum()} differ, first at {place}: {found[place]:#x} instead of {expected[place]:#x}")
    return "all bits equal"
