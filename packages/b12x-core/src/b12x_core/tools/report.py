"""`python -m b12x_core.tools.report`: what the loops that multiply issue, kernel by kernel, without a GPU.

It compiles for an architecture what planning chooses, or reads cubins. For each kernel: instructions of an iteration of
the main loop for each matrix instruction (`main_loop`), registers, shared memory, blocks that a multiprocessor holds,
and how many times the matrix unit's rate the schedulers and the width of shared memory allow.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from b12x_core import runtime
from b12x_core.planning import inventory
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear import LinearConfig
from b12x_core.runtime.devices import ARCHITECTURES
from b12x_core.runtime.store import Entry
from b12x_core.tools.main_loop import CLASSES, MATRIX_CYCLES, Loop, main_loop
from b12x_core.tools.sass import Resources, disassemble, dynamic_shared, resources

SETS = {"representative": inventory.representative, "all": inventory.everything}

_REGISTERS, _WARP_REGISTERS = 65_536, 256
_SHARED, _SYSTEM_SHARED = 102_400, 1024
_THREADS, _BLOCKS = 1536, 24
"""Of a multiprocessor of compute capability 12.0; registers are given to warps in units of 256."""


@dataclass(frozen=True)
class Row:
    """What is known of a kernel before it runs.

    Attributes:
        name: of the kernel.
        threads, registers, shared: threads of a block, registers of a thread, bytes of shared memory of a block.
        stages: of its pipeline; 0 if unknown.
        blocks: that a multiprocessor of SM120 holds at once.
        matrix: matrix instruction of the main loop -> how often an iteration has it.
        per_matrix: kind of instruction -> how many for each matrix instruction.
        issue_bound, shared_bound: as of `Loop`.
    """

    name: str
    threads: int
    registers: int
    shared: int
    stages: int
    blocks: int
    matrix: dict[str, int]
    per_matrix: dict[str, float]
    issue_bound: float
    shared_bound: float

    def line(self) -> str:
        """For people."""
        parts = " ".join(f"{kind} {self.per_matrix[kind]:.2f}" for kind in CLASSES if self.per_matrix[kind])
        return (
            f"{self.name}: {' '.join(f'{n} {name}' for name, n in self.matrix.items())}; for each: {parts}; "
            f"{self.registers} registers, {self.shared} bytes shared, {self.blocks} x {self.threads} threads, "
            f"issue allows {self.issue_bound:.1f} times the matrix rate, shared memory {self.shared_bound:.1f}"
        )


def occupancy(threads: int, registers: int, shared: int) -> int:
    """Blocks that a multiprocessor of compute capability 12.0 holds at once."""
    warps = -(-threads // 32)
    by_registers = _REGISTERS // (-(-registers * 32 // _WARP_REGISTERS) * _WARP_REGISTERS * warps)
    return min(_BLOCKS, _THREADS // (32 * warps), by_registers, _SHARED // (shared + _SYSTEM_SHARED))


def row(name: str, cubin: bytes, ir: str, stages: int = 0) -> Row | None:
    """The row of a kernel.

    Args:
        name: of the kernel.
        cubin: its device code.
        ir: its host code in MLIR, which has the dynamic shared memory.
        stages: of its pipeline.

    Returns:
        None if it does not multiply in a loop.
    """
    loop: Loop | None = main_loop(disassemble(cubin))
    if loop is None:
        return None
    found: Resources = resources(cubin)
    shared = found.static_shared + dynamic_shared(ir)
    return Row(
        name,
        found.threads,
        found.registers,
        shared,
        stages,
        occupancy(found.threads, found.registers, shared),
        loop.matrix,
        {kind: round(count, 3) for kind, count in loop.per_matrix.items()},
        round(loop.issue_bound, 3),
        round(loop.shared_bound, 3),
    )


def compiled(specs: list[KernelSpec], arch: str, workers: int | None = None) -> list[Row]:
    """The rows of kernels, compiled if they are not."""
    runtime.compile_all(specs, arch, keep=True, workers=workers)
    rows = []
    for spec in specs:
        library = Entry(spec, arch).find()
        assert library is not None
        folder, stages = library.parent, getattr(spec.config, "stages", 0)
        found = row(spec.name, (folder / "kernel.cubin").read_bytes(), (folder / "kernel.mlir").read_text(), stages)
        if found is not None:
            rows.append(found)
    return rows


def main() -> int:
    """Print and write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m b12x_core.tools.report", description=__doc__)
    parser.add_argument("--arch", choices=sorted(set(ARCHITECTURES.values())), default="sm_120a")
    parser.add_argument("--kernels", choices=tuple(SETS), default="representative", help="which to compile")
    parser.add_argument("--only", default="", help="those whose name contains this text")
    parser.add_argument(
        "--cubin", type=Path, nargs="*", help="read these instead; NAME.mlir must lie beside NAME.cubin"
    )
    parser.add_argument("--workers", type=int, default=None, help="kernels to compile at once")
    parser.add_argument("--output", type=Path, default=None, help="write the rows to this JSON file")
    options = parser.parse_args()
    if options.cubin:
        files = [(path, path.with_suffix(".mlir").read_text()) for path in options.cubin]
        rows = [found for path, ir in files if (found := row(path.stem, path.read_bytes(), ir))]
    else:
        linear = [spec for spec in SETS[options.kernels]() if isinstance(spec.config, LinearConfig)]
        rows = compiled([spec for spec in linear if options.only in spec.name], options.arch, options.workers)
    for found in rows:
        print(found.line())
    if options.output is not None:
        content = {"arch": options.arch, "matrix_cycles": MATRIX_CYCLES, "rows": [asdict(found) for found in rows]}
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
