"""The record of a benchmark: one JSON file a benchmark and GPU in `docs/performance/`."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from ceilings import Ceilings


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        op, scheme, shape: what ran; `shape` also says which input it started from.
        us: microseconds a call, median.
        bytes: of the weight with its scales.
        flops: floating-point operations.
        peers: peer -> microseconds in the same run.
        kernel: the configuration that ran.
        error: ||y - truth|| / ||truth|| on the same operands.
        floor_us: the time of a tuned pure read of `bytes`.
        mma_tflops: measured rate of the matrix instruction that the kernel issues.
    """

    op: str
    scheme: str
    shape: dict[str, int | str]
    us: float
    bytes: int
    flops: int
    peers: dict[str, float]
    kernel: str
    error: float
    floor_us: float
    mma_tflops: float

    @property
    def read_fraction(self) -> float:
        """The floor over the time: 1 is as fast as memory can be read."""
        return self.floor_us / self.us

    @property
    def tflops(self) -> float:
        """Rate reached."""
        return self.flops / self.us / 1e6

    @property
    def fastest(self) -> float | None:
        """How many times as fast as the fastest peer; None without one."""
        return min(self.peers.values()) / self.us if self.peers else None

    def line(self) -> str:
        """For people."""
        shape = " ".join(f"{value}" for value in self.shape.values())
        ratio = (
            "-" if self.fastest is None else f"{self.fastest:.2f}x of {min(self.peers, key=lambda n: self.peers[n])}"
        )
        return (
            f"{self.scheme:18} {shape:26} {self.us:8.2f} us  {self.bytes / self.us / 1e3:6.0f} GB/s "
            f"{self.read_fraction:5.0%} of read  {self.tflops:6.0f} TFLOP/s "
            f"{self.tflops / self.mma_tflops:4.0%} of mma  "
            f"err {self.error:.1e}  {ratio}  [{self.kernel}]"
        )

    def as_json(self) -> dict[str, object]:
        """As DESIGN.md's record has it."""
        return {
            "op": self.op,
            "scheme": self.scheme,
            "shape": self.shape,
            "us": round(self.us, 3),
            "bytes": self.bytes,
            "flops": self.flops,
            "read_fraction": round(self.read_fraction, 4),
            "mma_fraction": round(self.tflops / self.mma_tflops, 4),
            "peers": {name: round(us, 3) for name, us in self.peers.items()},
            "kernel": self.kernel,
            "error": float(f"{self.error:.3g}"),
        }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("b12x-core", "apache-tvm-ffi", "nvidia-cutlass-dsl", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def write(folder: str | Path, benchmark: str, rows: list[Row], ceilings: Ceilings) -> Path:
    """Write `<folder>/<benchmark>-<gpu>.json` and return its path."""
    gpu = torch.cuda.get_device_name()
    path = Path(folder, f"{benchmark}-{gpu.removeprefix('NVIDIA ').replace(' ', '-').lower()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "gpu": gpu,
        "driver": _driver(),
        "date": datetime.date.today().isoformat(),
        "versions": _versions(),
        "ceilings": ceilings.as_json(),
        "rows": [row.as_json() for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
