"""What the main loops of the `b12x` package's dense block-scaled kernels issue, beside ours, without a GPU.

uv pip install --target FOLDER --no-deps b12x
python packages/b12x-core/benchmarks/upstream_loops.py --package FOLDER --output docs/performance/loops-sm120a.json

Its kernels are compiled for sm_120a by the compiler that this project pins, with the tiles that it chooses itself for
an RTX PRO 6000 (188 multiprocessors). Ours are those that planning chooses for the same problems.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from b12x_core.ops._linear_kernel import linear_spec
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear_plan import LinearProblem, plan_linear
from b12x_core.tools.main_loop import MATRIX_CYCLES
from b12x_core.tools.report import Row, compiled, row

MULTIPROCESSORS = 188
N, K = 5120, 17408
TOKENS = (1, 128, 4096)
FORMATS = {"nvfp4": ("e2m1", "e2m1", "nv16"), "mxfp4": ("e2m1", "e2m1", "mx32"), "mxfp8": ("e4m3", "e4m3", "mx32")}
"""Format of both operands -> weight, activation and scales of our configuration."""


class _Absent(types.ModuleType):
    """Stands for Triton, which the package imports and compiling its dense kernels does not use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def load(package: Path) -> Any:
    """The module of the package's dense kernels."""
    os.environ["CUTE_DSL_ARCH"] = "sm_120a"
    sys.path.insert(0, str(package))
    importlib.import_module("torch._inductor.runtime.hints")  # looks for Triton, and must see that there is none
    for name in ("triton", "triton.language"):
        module = _Absent(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = module
    sys.modules["triton"].jit = lambda *f, **options: f[0] if f else lambda g: g  # type: ignore[attr-defined]
    from b12x._lib import dense_gemm  # type: ignore[import-not-found]

    return dense_gemm


def lowered(gemm: Any, form: str, m: int) -> Any:
    """The configuration that the package chooses for M tokens of a format."""
    four, element = form != "mxfp8", torch.uint8 if form != "mxfp8" else torch.float8_e4m3fn
    x, w = (torch.empty(rows, K // 2 if four else K, 1, dtype=element, device="meta") for rows in (m, N))
    scales = torch.empty(1, dtype=torch.uint8, device="meta")
    return gemm._lower_dense_gemm(
        (x, scales),
        (w, scales),
        ab_dtype="float4_e2m1fn" if four else "float8_e4m3fn",
        sf_dtype="float8_e4m3fn" if form == "nvfp4" else "float8_e8m0fnu",
        c_dtype="bfloat16",
        sf_vec_size=16 if form == "nvfp4" else 32,
        sm_count=MULTIPROCESSORS,
        alpha=torch.empty(1, device="meta") if form == "nvfp4" else None,
    )


def theirs(package: Path, form: str, m: int) -> Row | None:
    """The row of the kernel that the package compiles; to be called once a process, since compiling leaves traces."""
    import cuda.bindings.driver as cuda

    gemm = load(package)
    plan, made, stages = lowered(gemm, form, m), [], []
    count = gemm.DenseGemmKernel._compute_stages

    def compile_kernel(launch: Any, *arguments: Any, compile_spec: Any = None) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            options = f"--keep-cubin --dump-dir {folder}"
            made.append(gemm.cute.compile(launch, *arguments, options=options))
        return made[0]

    def counted(*arguments: Any, **options: Any) -> Any:
        found = count(*arguments, **options)
        stages.append(found[0])
        return found

    with (
        mock.patch.object(gemm, "b12x_compile", compile_kernel),
        mock.patch.object(gemm, "current_cuda_stream", return_value=cuda.CUstream(0)),
        mock.patch.object(gemm, "attach_programs", lambda function, program: function),
        mock.patch.object(gemm, "get_num_sm", return_value=MULTIPROCESSORS),
        mock.patch("b12x._lib.utils.get_num_sm", return_value=MULTIPROCESSORS),
        mock.patch.object(gemm.DenseGemmKernel, "_compute_stages", staticmethod(counted)),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        build = gemm._compile_dense_lowering
        try:
            getattr(build, "__wrapped__", build)(plan.to_dict(), 0)
        except ValueError as problem:  # MXFP4 in some of its tiles
            print(f"{form} M={m} does not compile there: {problem}", file=sys.stderr)
            return None
    name = f"{plan.mma_tiler_mn[0]}x{plan.mma_tiler_mn[1]}-k{plan.tile_k}"
    return row(name, made[0].__cubin__, str(made[0].ir_module), stages[0] if stages else 0)


def ours(form: str, m: int) -> KernelSpec:
    """The kernel that planning chooses."""
    weight, activation, scales = FORMATS[form]
    problem = LinearProblem(weight, activation, "bf16", scales, m, N, K)
    return linear_spec(plan_linear(problem, MULTIPROCESSORS))


def rows(package: Path, workers: int | None, upstream_only: bool) -> Iterator[dict[str, Any]]:
    """A row for each kernel."""
    for form in FORMATS:
        for m in TOKENS:
            named = {"format": form, "m": m}
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(theirs, (package, form, m))
            if found is not None:
                yield {"by": "b12x", **named, **asdict(found)}
            if upstream_only:
                continue
            for own in compiled([ours(form, m)], "sm_120a", workers):
                yield {"by": "b12x-core", **named, **asdict(own)}


def main() -> None:
    """Compile and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True, help="folder that holds the package")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=None, help="kernels of ours to compile at once")
    parser.add_argument("--upstream-only", action="store_true", help="leave our kernels out")
    options = parser.parse_args()
    versions = {d.metadata["Name"]: d.version for d in distributions(path=[str(options.package)])}
    content = {
        "arch": "sm_120a",
        "upstream": f"b12x {versions['b12x']}",
        "n": N,
        "k": K,
        "matrix_cycles": MATRIX_CYCLES,
        "rows": list(rows(options.package, options.workers, options.upstream_only)),
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
