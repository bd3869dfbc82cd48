"""What the assembler made of a kernel: registers, stack, and counts of machine instructions.

Needs `nvidia-cuda-nvdisasm` and `pyelftools` (the extra `cuda`), no GPU and no CUDA toolkit. Numbers of the attributes
in `.nv.info` sections are those that `nvdisasm` prints as EIATTR_REGCOUNT, EIATTR_FRAME_SIZE and EIATTR_REQNTID.
"""

from __future__ import annotations

import importlib.metadata
import io
import math
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

from b12x_core.errors import B12xError

_EIATTR_REQNTID, _EIATTR_FRAME_SIZE, _EIATTR_REGCOUNT = 0x10, 0x11, 0x2F
_WITH_PAYLOAD = 0x04  # format of an attribute whose size field counts bytes that follow; the others hold a value there
_RESERVED_SHARED = 1024  # of the system's, in every block; the limit of a block does not count it
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_MATRIX = ("HMMA", "QMMA", "OMMA", "IMMA")


@dataclass(frozen=True)
class Resources:
    """What a kernel takes.

    Attributes:
        registers: a thread.
        stack: bytes of local memory a thread. Spilled registers live there; 0 means none.
        static_shared: bytes of shared memory known to the assembler; dynamic shared memory is the launch's.
        code: bytes of machine code.
        instructions: machine instruction without its modifiers -> how often it stands in the code.
        matrix: matrix instructions with their modifiers -> how often each stands in the code.
        threads: of a block; 0 if the code does not fix it.
    """

    registers: int
    stack: int
    static_shared: int
    code: int
    instructions: dict[str, int]
    matrix: dict[str, int]
    threads: int = 0

    @property
    def spills(self) -> int:
        """Loads and stores of local memory in the code."""
        return self.instructions.get("LDL", 0) + self.instructions.get("STL", 0)


def nvdisasm() -> Path:
    """The disassembler of the `nvidia-cuda-nvdisasm` distribution, or one on PATH.

    Raises:
        B12xError: there is none.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            return Path(str(file.locate()))
    found = shutil.which("nvdisasm")
    if found is None:
        raise B12xError("sass: nvdisasm was not found; pip install nvidia-cuda-nvdisasm")
    return Path(found)


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise B12xError(f"sass: nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """(attribute, payload) of a `.nv.info` section."""
    found, offset = [], 0
    while offset + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, offset)
        offset += 4
        payload = data[offset : offset + size] if form == _WITH_PAYLOAD else b""
        found.append((attribute, payload))
        offset += len(payload)
    return found


def dynamic_shared(ir: str) -> int:
    """Bytes of dynamic shared memory of a block, from the host code of a kernel in MLIR's LLVM dialect.

    It is the third field of the launch configuration (`cudaLaunchConfig_t`); of several launches, the largest.

    Raises:
        B12xError: there is no launch, or its field is no constant.
    """
    fields = re.findall(r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : [^\n]*array<3 x i32>, i64, ptr, ptr, i32", ir)
    stored = {to: value for value, to in re.findall(r"llvm\.store (%\w+), (%\w+) : i64", ir)}
    constants = {name: int(size) for name, size in re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", ir)}
    try:
        return max(constants[stored[field]] for field in fields)
    except (KeyError, ValueError) as error:
        raise B12xError("sass: the host code has no launch with a constant size of shared memory") from error


def resources(cubin: bytes, code_text: str | None = None) -> Resources:
    """The resources of a cubin; of several kernels in one, the largest of each and the sum of the code.

    `code_text` is what `disassemble` makes of it, for those who have that.
    """
    elf = ELFFile(io.BytesIO(cubin))
    registers = stack = shared = code = threads = 0
    for section in elf.iter_sections():
        if section.name == ".nv.info":
            for attribute, payload in _attributes(section.data()):
                if attribute == _EIATTR_REGCOUNT:
                    registers = max(registers, struct.unpack("<II", payload)[1])
                elif attribute == _EIATTR_FRAME_SIZE:
                    stack = max(stack, struct.unpack("<II", payload)[1])
        elif section.name.startswith(".nv.info."):
            for attribute, payload in _attributes(section.data()):
                if attribute == _EIATTR_REQNTID:
                    threads = max(threads, math.prod(struct.unpack("<III", payload)))
        elif section.name.startswith(".nv.shared.") and not section.name.startswith(".nv.shared.reserved"):
            shared = max(shared, section.data_size - _RESERVED_SHARED)
        elif section.name.startswith(".text."):
            code += section.data_size
    found = _INSTRUCTION.findall(disassemble(cubin) if code_text is None else code_text)
    instructions = Counter(name.partition(".")[0] for name in found)
    matrix = Counter(name for name in found if name.startswith(_MATRIX))
    sorted_instructions, sorted_matrix = dict(sorted(instructions.items())), dict(sorted(matrix.items()))
    return Resources(registers, stack, shared, code, sorted_instructions, sorted_matrix, threads)
