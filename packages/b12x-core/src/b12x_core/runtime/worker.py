"""The process that compiles: `python -m b12x_core.runtime.worker`, a line of JSON a kernel in, a line out.

The only process that imports the compiler. `CUTE_DSL_ARCH` in its environment is the architecture. A request is
`{"spec", "key", "arch", "folder", "keep"}`; `kernel.so` is put into the folder, and with `keep` what it was made of.
The answer is `{"seconds", "peak_bytes"}` or `{"error"}`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from b12x_core.errors import CompileError
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import keys, store

HOST_TARGET = {"x86_64": ("x86-64-v2", "+sse4.2"), "aarch64": ("generic", "+neon")}
"""CPU and features that host code is compiled for, by machine: a kernel must run where it is shipped."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def _compile(spec: KernelSpec, folder: Path, keep: bool) -> None:
    if importlib.util.find_spec("cutlass") is None:
        raise CompileError(f"the compiler is not installed: pip install '{keys.COMPILER}=={keys.COMPILER_VERSION}'")
    kernels = importlib.import_module(spec.module)
    options = f"--keep-ptx --keep-cubin --dump-dir {folder / 'dump'}" if keep else ""
    if keep:
        (folder / "dump").mkdir()
    compiled = kernels.compile(spec.config, options)
    _target_any_host(compiled)
    compiled.export_to_c(object_file_path=str(folder / "kernel.o"), function_name=store.FUNCTION)
    _link(folder / "kernel.o", folder / store.LIBRARY)
    if keep:
        (folder / "kernel.ptx").write_text(compiled.__ptx__)
        (folder / "kernel.mlir").write_text(str(compiled.ir_module))
        (folder / "kernel.cubin").write_bytes(compiled.__cubin__)
        shutil.rmtree(folder / "dump")
    else:
        (folder / "kernel.o").unlink()


def _target_any_host(compiled: Any) -> None:
    """Keep the compiler from using all that the CPU of this machine has, which an export does by default."""
    ir = importlib.import_module("cutlass._mlir.ir")
    cpu, features = HOST_TARGET[platform.machine()]

    def mark(operation: Any) -> Any:
        if operation.operation.name == "llvm.func":
            attributes = operation.operation.attributes
            attributes["target_cpu"] = ir.StringAttr.get(cpu)
            attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
        return ir.WalkResult.ADVANCE

    with compiled.ir_module.context:
        compiled.ir_module.operation.walk(mark)


def _link(objects: Path, library: Path) -> None:
    linker = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if linker is None:
        raise CompileError("linking a kernel needs a C compiler: none of cc, gcc and clang is installed")
    runtime = importlib.import_module("cutlass.cute.runtime")
    # Two names to look up when it is loaded, and no folder of this machine.
    libraries = runtime.find_runtime_libraries(enable_tvm_ffi=True)
    command = [linker, "-shared", "-o", str(library), str(objects), *libraries]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise CompileError(f"{' '.join(command)} failed: {run.stderr.strip()}")


def _describe(error: Exception) -> str:
    """The error, and where it was raised unless it is one of ours, which says it all."""
    if isinstance(error, CompileError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/dsl_packages/" not in frame.filename]
    place = f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return _COLOURS.sub("", "".join(traceback.format_exception_only(error)).strip()) + place


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Build what is requested."""
    begin = time.perf_counter()
    try:
        spec = KernelSpec.from_json(request["spec"])
        if keys.key(spec, request["arch"]) != request["key"]:
            raise CompileError("its source was changed after the process that asks for it had read it; start it again")
        _compile(spec, Path(request["folder"]), request["keep"])
    except Exception as error:  # whatever the compiler raises is an answer
        return {"error": _describe(error)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": round(time.perf_counter() - begin, 3), "peak_bytes": peak}


def main() -> None:
    """Answer requests until the input ends."""
    # Whatever else prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
