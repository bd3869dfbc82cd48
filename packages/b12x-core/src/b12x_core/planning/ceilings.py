"""Configurations of the kernels that measure what a GPU can do at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CeilingConfig:
    """Everything about such a kernel that is fixed when it is compiled.

    `launch` takes, by position, for "read": data uint8, 16-byte aligned, sink (1,) uint32, how many bytes to read, a
    multiple of 16, and the number of CTAs; for "mma": sink (1,) uint32, loops, the number of CTAs. Nothing is written
    to the sink.

    Attributes:
        kind: "read" or "mma".
        threads: threads of a CTA.
        vectors: "read": loads of 16 bytes that a thread has in flight.
        element: "mma": "bf16" or "e4m3".
        rows, columns: "mma": fragments that a warp multiplies, each of the rows with each of the columns.
        overlap: whether the kernel may start while the one before it ends (programmatic dependent launch).
    """

    kind: str
    threads: int
    vectors: int = 1
    element: str = ""
    rows: int = 0
    columns: int = 0
    overlap: bool = False

    @property
    def name(self) -> str:
        """A unique name, safe in file names."""
        what = f"v{self.vectors}" if self.kind == "read" else f"-{self.element}-{self.rows}x{self.columns}"
        return f"ceiling-{self.kind}-{self.threads}{what}{'-overlap' if self.overlap else ''}"

    def mma_flops(self, loops: int, ctas: int) -> int:
        """Operations of a launch of "mma"."""
        k = {"bf16": 16, "e4m3": 32}[self.element]
        return 2 * 16 * 8 * k * self.rows * self.columns * loops * (self.threads // 32) * ctas


READ_SHAPES: tuple[tuple[CeilingConfig, int], ...] = tuple(
    (CeilingConfig("read", threads, vectors, overlap=overlap), ctas)
    for overlap in (False, True)
    for threads, vectors, ctas in ((256, 4, 8), (256, 8, 8), (512, 4, 4), (512, 8, 2), (256, 16, 3))
)
"""Read kernels and how many CTAs each starts for a multiprocessor; the best of them is the ceiling of a size."""

MMA_SHAPES = ((256, 4, 3), (256, 4, 4), (256, 4, 8), (384, 4, 3), (384, 4, 4))
"""Threads and tiles of the matrix kernel; the best of them is the ceiling."""
