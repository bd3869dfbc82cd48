"""A kernel compiled for sm_120a, linked with device code for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from b12x_conformance.emulation import Artifacts, EmulationError, emulate
from b12x_conformance.emulation.link import dsl_libraries
from ptx_modules import missing

pytestmark = pytest.mark.skipif(bool(missing("nvcc", "ptxas", "cc")), reason=missing("nvcc", "ptxas", "cc") or "-")

BUILD = """
import pathlib, sys
from b12x_conformance.emulation.instructions import cases
folder = pathlib.Path(sys.argv[1])
compiled = next(case for case in cases() if case.name == "cvt-from-narrow").probe.compile()
compiled.export_to_c(object_file_path=str(folder / "kernel.o"), function_name="launch")
(folder / "kernel.ptx").write_text(compiled.__ptx__)
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with kernel.o and kernel.ptx of a kernel compiled for sm_120a."""
    folder = tmp_path_factory.mktemp("artifacts")
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_120a"}
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], env=environment, check=True)
    return folder


def defined(library: Path) -> set[str]:
    """Symbols that a library defines for others, and those that it takes from others."""
    printed = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    return {" ".join(line.split()[-2:]) for line in printed.splitlines()}


def code(library: Path) -> bytes:
    """The machine code of the launcher."""
    command = [
        "objdump",
        "-d",
        "--no-addresses",
        "--no-show-raw-insn",
        f"--disassemble={'__tvm_ffi_launch'}",
        str(library),
    ]
    return subprocess.run(command, capture_output=True, check=True).stdout.split(b"<__tvm_ffi_launch>:")[1]


def test_the_host_side_is_the_shipped_one(artifacts: Path, tmp_path: Path) -> None:
    plain, emulated = tmp_path / "plain.so", tmp_path / "folder" / "emulated.so"
    subprocess.run(["cc", "-shared", "-o", plain, artifacts / "kernel.o", *dsl_libraries()], check=True)
    before = (artifacts / "kernel.o").read_bytes()
    assert emulate(artifacts, out=emulated) == emulated
    assert (artifacts / "kernel.o").read_bytes() == before
    assert defined(emulated) == defined(plain)
    assert [line.split()[0] for line in code(emulated).splitlines() if line.strip()] == [
        line.split()[0] for line in code(plain).splitlines() if line.strip()
    ]


def test_both_cubins_are_inside_and_the_other_is_handed_over(artifacts: Path, tmp_path: Path) -> None:
    library = emulate(artifacts, out=tmp_path / "kernel.so").read_bytes()
    # ELF flags of a cubin: the architecture, 120 or 90, in their second byte
    found = {library[i + 49] for i in range(len(library)) if library.startswith(b"\x7fELF\x02\x01\x01\x41", i)}
    assert found == {120, 90}


def test_a_compiled_function_is_exported(artifacts: Path, tmp_path: Path) -> None:
    def export_to_c(object_file_path: str, function_name: str) -> None:
        assert function_name == "launch"
        Path(object_file_path).write_bytes((artifacts / "kernel.o").read_bytes())

    compiled = SimpleNamespace(__ptx__=(artifacts / "kernel.ptx").read_text(), export_to_c=export_to_c)
    assert emulate(compiled, out=tmp_path / "a.so").exists()
    with pytest.raises(EmulationError, match="--keep-ptx"):
        emulate(SimpleNamespace(__ptx__=None), out=tmp_path / "b.so")


def test_incomplete_input_is_named(artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match=r"has no kernel\.o"):
        emulate(tmp_path, out=tmp_path / "a.so")
    (tmp_path / "other.o").write_bytes(b"nothing")
    with pytest.raises(EmulationError, match="does not load its cubin"):
        emulate(Artifacts(tmp_path / "other.o", (artifacts / "kernel.ptx").read_text()), out=tmp_path / "a.so")
