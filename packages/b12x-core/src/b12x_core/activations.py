"""The activation between the two GEMMs of an expert, as a value.

With g the gate and u the up projection of a gated expert, or x the only projection of one that is not:

- gated: `f(g) * u`; not gated: `f(x)`
- swiglu: `g * sigmoid(alpha * g) * (u + beta)`

where f is silu, gelu (erf), gelu_tanh or relu2 (the square of relu). A `limit` L clamps before the function: g to at
most L, u to [-L, L]. That order and the one-sided clamp of the gate are those of the gpt-oss reference code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from b12x_core.errors import ArgumentError

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu")


@dataclass(frozen=True)
class Activation:
    """An expert's activation.

    Attributes:
        function: one of `FUNCTIONS`.
        gated: whether the first GEMM yields a gate and an up projection (2 * I rows) or one projection (I rows).
        alpha, beta: constants of swiglu; 1 and 0 for every other function.
        limit: clamp before the function, or None. Gated functions only.

    Raises:
        ArgumentError: a combination that no model defines.
    """

    function: str
    gated: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise ArgumentError(f"Activation: function must be one of {', '.join(FUNCTIONS)}; got {self.function!r}")
        if self.function == "swiglu" and not self.gated:
            raise ArgumentError("Activation: swiglu is defined for gated experts only; got gated=False")
        if self.function != "swiglu" and (self.alpha, self.beta) != (1.0, 0.0):
            raise ArgumentError(
                f"Activation: alpha and beta belong to swiglu; got alpha={self.alpha}, beta={self.beta} "
                f"with {self.function}"
            )
        if self.limit is not None and not (self.gated and 0.0 < self.limit < math.inf):
            raise ArgumentError(
                f"Activation: limit must be positive and finite, of a gated function; got limit={self.limit}, "
                f"gated={self.gated}"
            )

    @property
    def rows(self) -> int:
        """Rows of the first GEMM for each row of the intermediate: 2 if gated, else 1."""
        return 2 if self.gated else 1


def SwiGLU(alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> Activation:  # noqa: N802, a constructor
    """`g * sigmoid(alpha * g) * (u + beta)`. gpt-oss: alpha 1.702, beta 1, limit 7."""
    return Activation("swiglu", True, alpha, beta, limit)


SILU = Activation("silu")
GELU = Activation("gelu")
GELU_TANH = Activation("gelu_tanh")
RELU2 = Activation("relu2")
SILU_NOT_GATED = Activation("silu", gated=False)
GELU_NOT_GATED = Activation("gelu", gated=False)
GELU_TANH_NOT_GATED = Activation("gelu_tanh", gated=False)
RELU2_NOT_GATED = Activation("relu2", gated=False)
