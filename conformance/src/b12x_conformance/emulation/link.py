"""A shared library whose host code is the shipped one and whose device code is made for another GPU.

The object that a kernel's compilation exports hands its embedded cubin to `_cudaLibraryLoadData` of the CuTe DSL's
runtime library. `ld --wrap` puts a function in between that hands over the retargeted cubin instead, so launch code,
TMA descriptors and kernel arguments stay exactly the shipped ones.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_conformance.emulation import tools
from b12x_conformance.emulation.errors import EmulationError
from b12x_conformance.emulation.retarget import assemble, retarget

_SHIM = r"""
extern const char b12x_retargeted_cubin[];
extern int __real__cudaLibraryLoadData(void*, const void*, void*, void*, unsigned, void*, void*, unsigned);
int __wrap__cudaLibraryLoadData(void* library, const void* code, void* options, void* values, unsigned count,
                                void* library_options, void* library_values, unsigned library_count) {
  (void)code;
  return __real__cudaLibraryLoadData(library, b12x_retargeted_cubin, options, values, count, library_options,
                                     library_values, library_count);
}
__asm__(".section .rodata\n.global b12x_retargeted_cubin\n.hidden b12x_retargeted_cubin\n.balign 64\n"
        "b12x_retargeted_cubin:\n.incbin \"kernel.cubin\"\n.previous\n");
"""


@dataclass(frozen=True)
class Artifacts:
    """What a kernel's compilation for sm_120a or sm_121a leaves.

    Attributes:
        object: the exported object file, `kernel.o`.
        ptx: text of its PTX module.
    """

    object: Path
    ptx: str

    @classmethod
    def of(cls, what: Any, folder: Path) -> Artifacts:
        """The artifacts of a compiled function or of a folder.

        Args:
            what: Artifacts; a folder with `kernel.o` and `kernel.ptx`; or what `cute.compile` returned with the options
                `--enable-tvm-ffi --keep-ptx`, whose exported function will be `launch`, with host code for the CPU of
                this machine.
            folder: where an object file may be written.

        Raises:
            EmulationError: something of it is missing.
        """
        if isinstance(what, cls):
            return what
        if isinstance(what, str | Path):
            found = cls(Path(what, "kernel.o"), "")
            for name in ("kernel.o", "kernel.ptx"):
                if not Path(what, name).exists():
                    raise EmulationError(f"{what} has no {name}")
            return cls(found.object, Path(what, "kernel.ptx").read_text())
        ptx = getattr(what, "__ptx__", None)
        if not ptx:
            raise EmulationError("the compiled function has no PTX: compile it with the option --keep-ptx")
        place = folder / "kernel.o"
        what.export_to_c(object_file_path=str(place), function_name="launch")
        return cls(place, ptx)


def emulate(
    compiled_or_artifacts: Any,
    arch: str = "sm_90a",
    *,
    out: str | Path,
    libraries: Iterable[str | Path] | None = None,
) -> Path:
    """Make a kernel for sm_120a run on another GPU: host code as shipped, PTX as shipped but for replaced instructions.

    Args:
        compiled_or_artifacts: see `Artifacts.of`.
        arch: what to run it on.
        out: the shared library to write. `tvm_ffi.load_module(out)["launch"]` then launches the kernel.
        libraries: what it is linked with; those that the CuTe DSL names if None and the DSL is installed. At run time
            `libcute_dsl_runtime.so` must be loaded with global symbols before.

    Returns:
        `out`.

    Raises:
        UnknownInstructionError: the kernel has an instruction that `arch` lacks and that nothing stands in for.
        ToolMissingError: nvcc, ptxas or cc is missing.
        ToolError: one of them failed.
        EmulationError: the input is incomplete, or the object loads its cubin in another way.
    """
    out = Path(out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts = Artifacts.of(compiled_or_artifacts, folder)
        module = retarget(artifacts.ptx, arch)
        (folder / "kernel.cubin").write_bytes(assemble(module, artifacts.ptx))
        if b"_cudaLibraryLoadData" not in artifacts.object.read_bytes():
            raise EmulationError(f"{artifacts.object} does not load its cubin by _cudaLibraryLoadData")
        (folder / "shim.c").write_text(_SHIM)
        tools.run("cc", "-O1", "-fPIC", "-fvisibility=hidden", "-c", "shim.c", "-o", "shim.o", folder=folder)
        needed = dsl_libraries() if libraries is None else libraries
        tools.run(
            "cc",
            "-shared",
            "-Wl,--wrap=_cudaLibraryLoadData",
            "-o",
            "linked.so",
            artifacts.object.resolve(),
            "shim.o",
            *(Path(library).resolve() for library in needed),
            folder=folder,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "linked.so", out)
    return out


def dsl_libraries() -> list[str]:
    """The shared libraries that an exported object needs; none where the CuTe DSL is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        return []
    from cutlass.cute.runtime import find_runtime_libraries

    return list(find_runtime_libraries(enable_tvm_ffi=True))
