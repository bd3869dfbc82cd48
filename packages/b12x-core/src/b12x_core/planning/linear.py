"""Configurations of the linear kernels.

Kernels import this, so its source is part of their keys; what chooses a configuration is in `linear_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 64
"""Weight rows of a packed tile."""

K_TILE_BYTES = 64
"""Bytes of K, of a weight of 8 or 16 bits, in a packed tile."""

SHARED_MEMORY = 101_376
"""Bytes of shared memory that a block may have on every target.

It is what compute capability 12.0 allows (CUDA C++ Programming Guide).
"""

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1}
"""Bytes of an element that a matrix instruction or the pipeline handles."""


@dataclass(frozen=True)
class LinearConfig:
    """Everything about a linear kernel that is fixed when it is compiled.

    Attributes:
        loop: "stream" (few tokens: the weight is streamed, K is split over the grid) or "tiled".
        weight: "bf16", "fp16" or "e4m3".
        activation: "bf16", "fp16" or "e4m3"; unlike `weight` only for 16-bit activations beside an e4m3 weight.
        out: "bf16", "fp16" or "fp32".
        scales: "end", applied to the finished sum, or "block", one for each 128 of K besides.
        rows: weight rows of a tile, a multiple of `TILE_ROWS`, or 16 or 32.
        tokens: tokens of a tile, a multiple of 8.
        k_tiles: packed tiles along K in a stage of the pipeline.
        stages: stages of the pipeline.
        warps_n, warps_t, warps_k: consumer warps along rows, tokens and K of a tile.
        checked: whether every lane of a warp says that it has read a stage, instead of one for all 32. It changes no
            result and costs time: the race checker of compute-sanitizer believes a lane for itself only.
    """

    loop: str
    weight: str
    activation: str
    out: str
    scales: str
    rows: int
    tokens: int
    k_tiles: int
    stages: int
    warps_n: int
    warps_t: int
    warps_k: int
    checked: bool = False

    @property
    def name(self) -> str:
        """A unique name, safe in file names."""
        pair = self.weight if self.weight == self.activation else f"{self.weight}x{self.activation}"
        return (
            f"{self.loop}-{pair}-{self.out}-{self.scales}-{self.rows}x{self.tokens}"
            f"-k{self.k_tiles}s{self.stages}-w{self.warps_n}{self.warps_t}{self.warps_k}"
            f"{'-checked' if self.checked else ''}"
        )

    @property
    def k_tile(self) -> int:
        """Elements of K in a packed tile."""
        return K_TILE_BYTES // ELEMENT_BYTES[self.weight]
