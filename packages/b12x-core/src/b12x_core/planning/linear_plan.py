"""From a linear problem to the kernel that serves it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from b12x_core.planning.linear import ELEMENT_BYTES, SHARED_MEMORY, LinearConfig


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
    if problem.weight != problem.activation:
        sizes = {8: (64, 4, 4, 4, 2), 16: (128, 2, 4, 8, 1), 32: (64, 4, 2, 4, 2)}[tokens]
    else:
        groups = -(-problem.n // 16)
        nbytes = problem.n * problem.k * ELEMENT_BYTES[problem.weight]
        if nbytes <= SMALL_WEIGHT and 2 * groups <= 3 * multiprocessors:
            stages = {8: 5, 16: 4, 32: 2}[tokens]
            return _config(problem, "stream", 16, tokens, 8, stages, 1, 1, 4), groups
        sizes = {8: (64, 4, 5, 4, 2), 16: (64, 4, 4, 4, 2), 32: (64, 4, 3, 4, 2)}[tokens]
    rows, k_tiles, stages, warps_n, warps_k = sizes
    return _config(problem, "stream", rows, tokens, k_tiles, stages, warps_n, 1, warps_k), multiprocessors


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
    """Shared memory of the stages of the tiled kernel."""
    x_bytes = ELEMENT_BYTES[config.activation] * config.tokens
    stage = ELEMENT_BYTES[config.weight] * config.rows + x_bytes
    return stage * config.k_tile * config.k_tiles * config.stages


_SMALL = {
    ("bf16", "end"): (128, 64, 1, 4, 2, 2, 1),
    ("e4m3", "end"): (128, 64, 1, 8, 4, 2, 1),
    ("e4m3", "block"): (128, 64, 2, 4, 4, 2, 1),
    ("wide", "end"): (128, 64, 1, 6, 2, 2, 1),
    ("wide", "block"): (128, 64, 1, 6, 4, 2, 1),
}
_MIDDLE = {
    ("bf16", "end"): (128, 128, 1, 6, 2, 4, 1),
    ("e4m3", "end"): (128, 64, 1, 8, 4, 2, 1),
    ("wide", "end"): (128, 128, 1, 4, 4, 2, 1),
}
_LARGE = {
    ("bf16", "end"): (256, 128, 1, 4, 4, 2, 1),
    ("e4m3", "end"): (256, 128, 1, 4, 4, 2, 1),
    ("e4m3", "block"): (128, 128, 2, 3, 4, 2, 1),
    ("wide", "end"): (256, 128, 1, 3, 4, 2, 1),
    ("wide", "block"): (128, 128, 1, 4, 4, 2, 1),
}
"""(operands, scales) -> rows, tokens, packed tiles and number of stages, warps along N, tokens and K."""


def _tiled(problem: LinearProblem, multiprocessors: int) -> LinearConfig:
    """The larger the tile, the less is read for each product; unless most multiprocessors would have none.

    Float32 outputs need more registers at the end than the largest tile leaves.
    """
    operands = "wide" if problem.weight != problem.activation else "e4m3" if problem.weight == "e4m3" else "bf16"
    key = (operands, problem.scales)
    sizes = _LARGE[key]
    if problem.m <= SMALL_TOKENS:
        sizes = _SMALL[key]
    else:
        tiles = -(-problem.n // sizes[0]) * -(-problem.m // sizes[1])
        # the smaller tile of 8-bit operands multiplies so much slower that many multiprocessors may rather idle
        enough = multiprocessors if operands == "bf16" else multiprocessors // 4
        if problem.out == "fp32" or problem.m <= 128 or tiles < enough:
            sizes = _MIDDLE.get(key, sizes)
    return _config(problem, "tiled", *sizes)
