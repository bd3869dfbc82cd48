"""Configurations of the linear kernels.

Kernels import this, so its source is part of their keys; what chooses a configuration is in `linear_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 64
"""Weight rows of a packed tile."""

K_TILE_BYTES = 64
"""Bytes of K in a packed tile, scales aside."""

SHARED_MEMORY = 101_376
"""Bytes of shared memory that a block may have on every target.

It is what compute capability 12.0 allows (CUDA C++ Programming Guide).
"""

WEIGHT_BITS = {"bf16": 16, "fp16": 16, "e4m3": 8, "e2m1": 4}
"""Bits of an element as it is stored."""

SCALE_BLOCK = {"nv16": 16, "mx32": 32}
"""Elements of K that share a scale which lies in the packed tile, one byte for each row."""


@dataclass(frozen=True)
class LinearConfig:
    """Everything about a linear kernel that is fixed when it is compiled.

    Attributes:
        loop: "stream" (few tokens: the weight is streamed, K is split over the grid) or "tiled".
        weight: "bf16", "fp16", "e4m3" or "e2m1".
        activation: what the loop reads: "bf16", "fp16", "e4m3" or "e2m1"; 16 bits beside a weight of fewer bits mean
            that the weight is decoded to them.
        out: "bf16", "fp16" or "fp32".
        scales: "end", applied to the finished sum; besides, "block", fp32 for each 128 rows and 128 of K, "nv16", e4m3
            for each row and 16 of K, or "mx32", e8m0 for each row and 32 of K.
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
        return 8 * K_TILE_BYTES // WEIGHT_BITS[self.weight]

    @property
    def tile_bytes(self) -> int:
        """Bytes of a packed tile, its scales included."""
        block = SCALE_BLOCK.get(self.scales)
        return TILE_ROWS * (K_TILE_BYTES + (self.k_tile // block if block else 0))

    @property
    def block_scaled(self) -> bool:
        """Whether the matrix instruction takes the scales of weight and activation."""
        return self.scales in SCALE_BLOCK and WEIGHT_BITS[self.activation] < 16
