"""What the current GPU can do at most: the figures that every measurement is compared with.

    python ceilings.py

A ceiling is measured with kernels of this package that read, or multiply, and do nothing else.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from b12x_core import runtime
from b12x_core.planning.ceilings import MMA_SHAPES, READ_SHAPES, CeilingConfig
from b12x_core.planning.kernel import KernelSpec
from timing import copies, median_us

BULK_BYTES = 8 << 30
"""Bytes of a read, or of a copy's two sides together, whose start and end do not matter."""

MMA_US = 2000
"""About how long a launch of matrix instructions takes, in microseconds."""


def _eager_us(call: Callable[[], object], count: int = 5) -> float:
    """Median microseconds of a call outside graphs, where torch copies by a kernel and not by a copy engine."""
    times = []
    for _ in range(count + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def _reads(data: list[torch.Tensor]) -> float:
    """Microseconds of one read of each of the (bytes,) uint8 tensors in turn, by the fastest kernel."""
    sink = torch.empty(1, dtype=torch.uint32, device="cuda")
    count = runtime.facts().multiprocessors
    best = float("inf")
    for config, each in READ_SHAPES:
        launch = runtime.get(KernelSpec("ceilings", config))
        calls = [partial(launch, part, sink, part.numel(), each * count) for part in data]
        best = min(best, median_us(calls, replays=5))
    return best


def read_us(nbytes: int) -> float:
    """Microseconds of a pure read of `nbytes` that are not in the L2 cache, one of many launches of a CUDA graph."""
    size = -(-nbytes // 16) * 16
    data = torch.zeros(copies(size) * size, dtype=torch.uint8, device="cuda")
    return _reads(list(data.split(size)))


def read_gbps() -> float:
    """GB/s of a read of 8 GiB."""
    data = torch.zeros(BULK_BYTES, dtype=torch.uint8, device="cuda")
    return BULK_BYTES / _reads([data]) / 1e3


def copy_gbps() -> float:
    """GB/s, read and written together, of torch's copy of 4 GiB."""
    source = torch.zeros(BULK_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return BULK_BYTES / _eager_us(lambda: target.copy_(source)) / 1e3


def mma_tflops(element: str) -> float:
    """TFLOP/s of the `mma.sync` of "bf16" or "e4m3" on operands that stay in registers."""
    sink = torch.empty(1, dtype=torch.uint32, device="cuda")
    count = runtime.facts().multiprocessors
    best = 0.0
    for threads, rows, columns in MMA_SHAPES:
        config = CeilingConfig("mma", threads, element=element, rows=rows, columns=columns)
        launch = runtime.get(KernelSpec("ceilings", config))
        loops = 1000
        first = _eager_us(partial(launch, sink, loops, count), 2)
        loops = int(loops * MMA_US / first)
        us = _eager_us(partial(launch, sink, loops, count))
        best = max(best, config.mma_flops(loops, count) / us / 1e6)
    return best


@dataclass
class Ceilings:
    """The ceilings of a GPU.

    Attributes:
        read_gbps: reading 8 GiB.
        copy_gbps: copying 4 GiB with torch, bytes read and bytes written.
        bf16_mma_tflops, e4m3_mma_tflops: `mma.sync` on registers, in tiles of a few fragments as a kernel has them.
            Hopper has no such e4m3 instruction: there ptxas converts to fp16 and multiplies that.
    """

    read_gbps: float
    copy_gbps: float
    bf16_mma_tflops: float
    e4m3_mma_tflops: float
    _floors: dict[int, float] = field(default_factory=dict, repr=False)

    @classmethod
    def measure(cls) -> Ceilings:
        """Those of the current GPU."""
        return cls(read_gbps(), copy_gbps(), mma_tflops("bf16"), mma_tflops("e4m3"))

    def floor_us(self, nbytes: int) -> float:
        """`read_us`, measured once."""
        if nbytes not in self._floors:
            self._floors[nbytes] = read_us(nbytes)
        return self._floors[nbytes]

    def mma_tflops(self, element: str) -> float:
        """The rate of the instruction for an activation of "bf16", "fp16" or "e4m3"."""
        return self.e4m3_mma_tflops if element == "e4m3" else self.bf16_mma_tflops

    def as_json(self) -> dict[str, float]:
        """As it stands in a record."""
        names = ("read_gbps", "copy_gbps", "bf16_mma_tflops", "e4m3_mma_tflops")
        return {name: round(getattr(self, name), 1) for name in names}


def main() -> None:
    """Print the ceilings, and the time of reads of several sizes."""
    ceilings = Ceilings.measure()
    reads = {f"{mib} MiB": round(ceilings.floor_us(mib << 20), 2) for mib in (1, 4, 16, 64, 89, 256)}
    print(json.dumps({**ceilings.as_json(), "read_us": reads}, indent=1))


if __name__ == "__main__":
    main()
