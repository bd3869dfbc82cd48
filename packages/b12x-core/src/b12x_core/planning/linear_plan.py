"""From a linear problem to the kernel that serves it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from b12x_core.planning.linear import SCALE_BLOCK, SHARED_MEMORY, TILE_ROWS, WEIGHT_BITS, LinearConfig


@dataclass(frozen=True)
class LinearPlan:
    """What one call launches.

    Attributes:
        config: the kernel.
        ctas: blocks of the grid.
        workspace: floats of scratch for the sums that are split.
    """

    config: LinearConfig
    ctas: int
    workspace: int


@dataclass(frozen=True)
class LinearProblem:
    """What is asked of a linear kernel: `weight` to `scales` as in `LinearConfig`, M tokens, an (N, K) weight."""

    weight: str
    activation: str
    out: str
    scales: str
    m: int
    n: int
    k: int

    @property
    def operands(self) -> str:
        """What the tables of sizes go by: the matrix instruction and what is done to the weight before it."""
        scaled = self.scales in SCALE_BLOCK
        if WEIGHT_BITS[self.activation] == 16:
            if self.weight == self.activation:
                return "bf16"
            if not scaled:
                return "wide"
            return f"decoded {self.weight}"
        return f"scaled {self.weight} {self.activation}" if scaled else self.activation


STREAM_TOKENS = 32
"""Most tokens of the loop that streams the weight. Beyond, it multiplies longer than it reads."""

SMALL_TOKENS = 64
"""Most tokens for which a tile has only 64."""


SMALL_WEIGHT = 20 << 20
"""Bytes of a weight that is read so fast that dividing tiles among blocks costs more than unequal loads."""


_checked = False


@contextlib.contextmanager
def checked_kernels() -> Iterator[None]:
    """Within this context plans have kernels that the race checker can follow (`LinearConfig.checked`)."""
    global _checked
    before, _checked = _checked, True
    try:
        yield
    finally:
        _checked = before


def plan_linear(
    problem: LinearProblem, multiprocessors: int, multiprocessor_shared_memory: int = SHARED_MEMORY + 1024
) -> LinearPlan:
    """The kernel and the grid for a problem, M and N at least 1, on a GPU of so many multiprocessors.

    The kernel does not depend on the GPU but for small weights; `multiprocessor_shared_memory` is as in `DeviceFacts`.
    """
    if problem.m <= STREAM_TOKENS:
        config, ctas = _stream(problem, multiprocessors)
        if ctas == multiprocessors and _crowded(config):
            ctas *= max(1, multiprocessor_shared_memory // (SHARED_MEMORY + 1024))
    else:
        config = _tiled(problem, multiprocessors)
        ctas = multiprocessors * (2 if _ring_bytes(config) <= HALF_OF_SHARED_MEMORY else 1)
    if _checked:
        config = dataclasses.replace(config, checked=True)
    # A block has parts of two shared tiles at most: the end of one, the beginning of another.
    return LinearPlan(config, ctas, 2 * ctas * config.rows * config.tokens)


def _config(
    problem: LinearProblem,
    loop: str,
    rows: int,
    tokens: int,
    k_tiles: int,
    stages: int,
    warps_n: int,
    warps_t: int,
    warps_k: int,
) -> LinearConfig:
    p = problem
    return LinearConfig(
        loop, p.weight, p.activation, p.out, p.scales, rows, tokens, k_tiles, stages, warps_n, warps_t, warps_k
    )


def _stream(problem: LinearProblem, multiprocessors: int) -> tuple[LinearConfig, int]:
    """The kernel and its blocks: equal shares of the weight; or, for a small one, a block for each 16 rows.

    As many stages as shared memory holds: they are the bytes that are on their way.
    """
    tokens = next(size for size in (8, 16, 32) if problem.m <= size)
    groups = -(-problem.n // 16)
    nbytes = problem.n * problem.k * WEIGHT_BITS[problem.weight] // 8
    few = _FEW_ROWS.get((problem.operands, tokens))
    if few and nbytes <= SMALL_WEIGHT and 2 * groups <= 3 * multiprocessors:
        k_tiles, stages, warps_k = few
        return _config(problem, "stream", 16, tokens, k_tiles, stages, 1, 1, warps_k), groups
    rows, k_tiles, stages, warps_n, warps_k = _STREAM[problem.operands][tokens]
    return _config(problem, "stream", rows, tokens, k_tiles, stages, warps_n, 1, warps_k), multiprocessors


_STREAM = {
    "bf16": {8: (64, 4, 5, 4, 2), 16: (64, 4, 4, 4, 2), 32: (64, 4, 3, 4, 2)},
    "e4m3": {8: (64, 4, 5, 4, 2), 16: (64, 4, 4, 4, 2), 32: (64, 4, 3, 4, 2)},
    "wide": {8: (64, 4, 4, 4, 2), 16: (128, 2, 4, 8, 1), 32: (64, 4, 2, 4, 2)},
    "decoded e2m1": {8: (64, 4, 3, 2, 4), 16: (128, 2, 3, 8, 2), 32: (64, 2, 3, 4, 2)},
    "decoded e4m3": {8: (128, 2, 4, 4, 2), 16: (64, 4, 3, 4, 2), 32: (64, 4, 2, 4, 2)},
    "scaled e4m3 e4m3": {8: (64, 4, 4, 4, 2), 16: (64, 4, 4, 4, 2), 32: (64, 4, 3, 4, 2)},
    "scaled e2m1 e2m1": {8: (64, 4, 4, 4, 2), 16: (64, 4, 4, 4, 2), 32: (64, 4, 3, 4, 2)},
    "scaled e2m1 e4m3": {8: (64, 4, 4, 4, 2), 16: (64, 4, 3, 4, 2), 32: (64, 4, 2, 4, 2)},
}
"""Operands -> tokens -> rows, packed tiles and number of stages, warps along N and K."""

_FEW_ROWS = {
    **{(operands, 8): (8, 5, 4) for operands in ("bf16", "e4m3")},
    **{(operands, 16): (8, 4, 4) for operands in ("bf16", "e4m3")},
    **{(operands, 32): (8, 2, 4) for operands in ("bf16", "e4m3")},
    ("decoded e2m1", 8): (8, 3, 8),
    ("decoded e2m1", 16): (8, 2, 8),
    ("decoded e2m1", 32): (4, 2, 4),
    ("decoded e4m3", 8): (8, 4, 8),
    ("decoded e4m3", 16): (8, 3, 8),
    ("decoded e4m3", 32): (4, 4, 4),
    ("scaled e4m3 e4m3", 8): (8, 5, 4),
    ("scaled e4m3 e4m3", 16): (8, 4, 4),
    ("scaled e4m3 e4m3", 32): (8, 3, 4),
    ("scaled e2m1 e2m1", 8): (8, 3, 4),
    ("scaled e2m1 e2m1", 16): (8, 3, 4),
    ("scaled e2m1 e2m1", 32): (8, 3, 4),
    ("scaled e2m1 e4m3", 8): (8, 3, 8),
    ("scaled e2m1 e4m3", 16): (8, 3, 4),
    ("scaled e2m1 e4m3", 32): (8, 2, 4),
}
"""(operands, tokens) -> packed tiles and number of stages, warps along K, where a block has 16 rows."""


def _crowded(config: LinearConfig) -> bool:
    """Whether blocks should fill every multiprocessor, where one could hold several.

    A kernel that quantizes runs in front. Where it holds a multiprocessor's last registers while blocks of this kernel
    arrive early, another one would get two of them and be the last to finish: 65 us instead of 42 were seen on an H200.
    Some kernels multiply so long that twice as many blocks, with smaller shares, cost more than that.
    """
    quantized = config.activation == config.weight == "e4m3"
    return quantized and config.tokens <= (8 if config.scales == "block" else 16)


HALF_OF_SHARED_MEMORY = 49152
"""Bytes of the ring of a block of which two fit a multiprocessor of SM120."""


def _ring_bytes(config: LinearConfig) -> int:
    """Shared memory of the operands of the tiled kernel, whose weights come for one or two stages of tokens."""
    x_bytes = config.tokens * config.k_tile * config.k_tiles * WEIGHT_BITS[config.activation] // 8
    w_bytes = config.rows // TILE_ROWS * config.tile_bytes * config.k_tiles
    if x_bytes > 128 * config.tokens:
        return config.stages * x_bytes // 2 + (config.stages // 2 + 1) * w_bytes
    return config.stages * (x_bytes + w_bytes)


_SMALL = {
    ("bf16", "end"): (128, 64, 1, 4, 2, 2, 1),
    ("e4m3", "end"): (128, 64, 1, 8, 4, 2, 1),
    ("e4m3", "block"): (128, 64, 2, 4, 4, 2, 1),
    ("wide", "end"): (128, 64, 1, 6, 2, 2, 1),
    ("wide", "block"): (128, 64, 1, 6, 4, 2, 1),
    ("decoded e2m1", ""): (256, 64, 1, 5, 8, 1, 1),
    ("decoded e4m3", ""): (128, 64, 1, 4, 4, 1, 1),
    ("scaled e4m3 e4m3", ""): (128, 64, 2, 3, 4, 1, 1),
    ("scaled e2m1 e2m1", ""): (128, 64, 2, 3, 4, 1, 1),
    ("scaled e2m1 e4m3", ""): (128, 64, 1, 3, 4, 1, 1),
}
_MIDDLE = {
    ("bf16", "end"): (128, 128, 1, 6, 2, 4, 1),
    ("e4m3", "end"): (128, 64, 1, 8, 4, 2, 1),
    ("wide", "end"): (128, 128, 1, 4, 4, 2, 1),
    ("decoded e2m1", ""): (128, 128, 1, 4, 4, 2, 1),
    ("decoded e4m3", ""): (128, 128, 1, 4, 4, 2, 1),
    ("scaled e2m1 e4m3", ""): (128, 128, 1, 3, 4, 2, 1),
}
_LARGE = {
    ("bf16", "end"): (256, 128, 1, 4, 4, 2, 1),
    ("e4m3", "end"): (256, 128, 1, 4, 4, 2, 1),
    ("e4m3", "block"): (128, 128, 2, 3, 4, 2, 1),
    ("wide", "end"): (256, 128, 1, 3, 4, 2, 1),
    ("wide", "block"): (128, 128, 1, 4, 4, 2, 1),
    ("decoded e2m1", ""): (256, 128, 1, 3, 4, 2, 1),
    ("decoded e4m3", ""): (256, 128, 1, 3, 4, 2, 1),
    ("scaled e4m3 e4m3", ""): (128, 128, 2, 2, 2, 2, 1),
    ("scaled e2m1 e2m1", ""): (128, 128, 2, 2, 2, 2, 1),
    ("scaled e2m1 e4m3", ""): (256, 128, 1, 2, 8, 1, 1),
}
"""Operands, and "end", "block", or "" for scales in the tiles -> rows, tokens, packed tiles and number of stages, warps
along N, tokens and K."""


def _tiled(problem: LinearProblem, multiprocessors: int) -> LinearConfig:
    """The larger the tile, the less is read for each product; unless most multiprocessors would have none.

    Float32 outputs need more registers at the end than the largest tile leaves.
    """
    operands = problem.operands
    scaled = problem.scales in SCALE_BLOCK
    key = (operands, "" if scaled else problem.scales)
    sizes = _LARGE[key]
    tiles = -(-problem.n // sizes[0]) * -(-problem.m // sizes[1])
    if problem.m <= SMALL_TOKENS:
        sizes = _SMALL[key]
        if operands == "decoded e2m1" and problem.n <= FEW_ROWS:
            sizes = (128, 64, 1, 3, 4, 1, 1)
    # the smaller tile of 8-bit operands multiplies so much slower that many multiprocessors may rather idle
    elif problem.out == "fp32" or 2 * tiles < _ENOUGH.get(operands, 3) * multiprocessors or problem.m <= _FEW[scaled]:
        sizes = _MIDDLE.get(key, sizes)
    return _config(problem, "tiled", *sizes)


_ENOUGH = {"bf16": 2, "e4m3": 0.5, "wide": 0.5}
"""Operands -> how many of the largest tiles there must be for each two multiprocessors; else 3."""

_FEW = {False: 128, True: 256}
"""Whether scales are in the tiles -> most tokens that never have the largest tile."""

FEW_ROWS = 4096
"""Rows that leave multiprocessors without a tile of 256: two blocks on each share tiles of half the size."""
