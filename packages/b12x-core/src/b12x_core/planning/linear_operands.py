"""From a scheme and an architecture to what the linear kernels read."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from b12x_core.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, Element, Scheme
from b12x_core.planning.linear import SCALE_BLOCK, WEIGHT_BITS

BLOCK_SCALED = ("sm_120a", "sm_121a")
"""Architectures whose matrix instructions take block scales."""

_BLOCK_SCALED_PAIRS = ((MXFP8, MXFP8), (NVFP4, NVFP4), (MXFP4, MXFP4), (MXFP4, MXFP8))
"""Formats of weight and activation that such an instruction multiplies.

One whose operands are e4m3 and e2m1 has a scale for each 32 of K of both, and nvfp4 one for each 16.
"""


@dataclass(frozen=True)
class Operands:
    """What the linear kernels read for a scheme.

    Attributes:
        weight: as in `LinearConfig`.
        activation: as in `LinearConfig`; "" for the type that x has.
        scales: as in `LinearConfig`.
        layout: what is written of a quantized activation, as in `QuantizeConfig`; "" where x is multiplied as it is.
            "values" are 16-bit numbers, exactly those that codes and scales stand for.
    """

    weight: str
    activation: str
    scales: str
    layout: str

    @property
    def scaled_tiles(self) -> bool:
        """Whether block scales lie in the tiles of the weight."""
        return self.scales in SCALE_BLOCK

    @property
    def block_scaled(self) -> bool:
        """Whether the matrix instruction takes block scales."""
        return self.scaled_tiles and self.activation in ("e4m3", "e2m1")

    @property
    def split_nibbles(self) -> bool:
        """Whether codes of two block-scaled instructions share bytes, as in `pack_blocks`."""
        return self.weight == "e2m1" and self.activation == "e4m3"

    @property
    def kernel(self) -> str:
        """What the support table and counts of calls name."""
        if not self.scaled_tiles:
            return "linear"
        return "linear_block_scaled" if self.block_scaled else "linear_decoded"


@functools.cache
def operands(scheme: Scheme, arch: str) -> Operands:
    """What the kernels of an architecture ("sm_120a") read for a scheme."""
    weight, activation = scheme.weight, scheme.activation
    element = weight.element.value
    if weight in (MXFP8, MXFP4, NVFP4):
        scales = "nv16" if weight == NVFP4 else "mx32"
        if not activation.quantized:
            return Operands(element, "", scales, "")
        if arch in BLOCK_SCALED and (weight, activation) in _BLOCK_SCALED_PAIRS:
            tile = 512 // WEIGHT_BITS[element]
            return Operands(element, activation.element.value, scales, f"tiles{tile}")
        return Operands(element, "bf16", scales, "values")
    by_block = weight == FP8_BLOCK
    if weight.element is not Element.E4M3:
        return Operands(element, "", "end", "")
    scales = "block" if by_block else "end"
    if not activation.quantized:
        return Operands(element, "", scales, "")
    return Operands(element, "e4m3", scales, "k-major" if by_block else "row")
