"""Timing of calls on a GPU, the way every figure in `docs/performance/` was taken."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch

ROTATED_BYTES = 220_000_000
"""Copies of the weights hold at least this much together, so that no call finds its weights in the L2 cache."""

Call = Callable[[], object]


def copies(nbytes: int) -> int:
    """How many copies of `nbytes` to rotate among."""
    return min(64, max(2, math.ceil(ROTATED_BYTES / nbytes)))


def median_us(calls: Sequence[Call], *, span_ms: float = 2.0, replays: int = 7) -> float:
    """Microseconds of one call: median over the replays of a CUDA graph in which `calls` take turns.

    The gap between two kernels of a graph is part of the figure, host time is not.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for call in calls:
        call()
    torch.cuda.synchronize()
    start.record()
    for call in calls[:3]:
        call()
    end.record()
    end.synchronize()
    estimate = start.elapsed_time(end) / min(3, len(calls))
    count = max(len(calls), min(256, math.ceil(span_ms / max(estimate, 1e-3))))
    count = -(-count // len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    return statistics.median(times) * 1e3


def relative_error(y: torch.Tensor, truth: torch.Tensor) -> float:
    """||y - truth|| / ||truth||; infinite if anything is NaN."""
    error = ((y.double() - truth.double()).norm() / truth.double().norm()).item()
    return error if error == error else math.inf
