"""A PTX module of sm_120a as one of sm_90a that does the same, and as a cubin."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from b12x_conformance.emulation import tools
from b12x_conformance.emulation.errors import EmulationError, ToolError, UnknownInstructionError
from b12x_conformance.emulation.ptx import Instruction, instructions, without_comments
from b12x_conformance.emulation.replace import StandIn, replacement

HEADER = Path(__file__).with_name("stand_ins.cuh")

_NEWER = re.compile(
    r"^(tcgen05\.|clusterlaunchcontrol\.|st\.bulk|mma\..*kind::|.*\bblock_scale\b|.*\b(e2m1|e3m2|e2m3|ue8m0|ue4m3|s2f6)(x\d)?\b"
    r"|.*\bf32x2\b|(ld|st)matrix\..*\b(m16n16|m8n16|m16n8)\b|redux\..*\bf32\b|cvt\.rs\b|.*\bcp_mask\b|.*\bcta_group"
    r"|.*\btile::(gather4|scatter4)|(ld|st)\..*\bv8\.[bfus]32)"
)
"""Opcodes that came with sm_100 or later; the assembler finds the others."""

_VERSION = re.compile(r"^(\s*\.version\s+)\d+\.\d+", re.MULTILINE)
_TARGET = re.compile(r"^(\s*\.target\s+)sm_\w+", re.MULTILINE)
_ADDRESS_SIZE = re.compile(r"^\s*\.address_size\s+64", re.MULTILINE)


@dataclass(frozen=True)
class Retargeted:
    """A module that another architecture can run.

    Attributes:
        ptx: the module. Its lines have the numbers that they had; functions are appended.
        arch: its target, `sm_90a`.
        replaced: opcodes that were replaced, one for each place.
    """

    ptx: str
    arch: str
    replaced: tuple[str, ...]


def retarget(ptx: str, arch: str = "sm_90a") -> Retargeted:
    """The module with every instruction of sm_100 and later replaced.

    Args:
        ptx: a module for sm_120a or sm_121a.
        arch: what to run it on.

    Raises:
        UnknownInstructionError: it has instructions known to be missing in `arch` that nothing stands in for.
        ToolMissingError: there is no nvcc, and a stand-in has to be compiled.
    """
    parts: list[str] = []
    replaced: list[str] = []
    needed: dict[str, StandIn] = {}
    unknown: list[Instruction] = []
    position = 0
    for instruction in instructions(ptx):
        new = replacement(instruction)
        if new is None:
            if _NEWER.match(instruction.opcode):
                unknown.append(instruction)
            continue
        # An instruction over several lines leaves as many, so that the assembler's line numbers hold.
        lines = "\n" * ptx.count("\n", instruction.start, instruction.end)
        parts += [ptx[position : instruction.start], new.text, lines]
        position = instruction.end
        replaced.append(instruction.opcode)
        if new.stand_in is not None:
            needed[new.stand_in.name] = new.stand_in
    if unknown:
        where = ", ".join(f"{i.opcode} (line {i.line})" for i in unknown)
        raise UnknownInstructionError(f"no stand-in for {arch}: {where}")
    text = "".join([*parts, ptx[position:]])
    text = _TARGET.sub(rf"\g<1>{arch}", text, count=1)
    if needed:
        functions = stand_in_ptx(needed.values(), arch)
        text = _with_functions(text, functions)
    return Retargeted(text, arch, tuple(replaced))


def stand_in_ptx(stand_ins: Iterable[StandIn], arch: str = "sm_90a") -> str:
    """A PTX module that defines stand-ins, compiled by nvcc."""
    return _compile("\n".join(sorted(s.source for s in stand_ins)), arch)


@functools.cache
def _compile(source: str, arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "wrappers.cu").write_text(f'#include "{HEADER}"\n{source}\n')
        target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch.replace('sm_', 'compute_')}"
        tools.run(
            "nvcc", "-std=c++17", target, "-rdc=true", "-ptx", "wrappers.cu", "-o", "out.ptx", folder=Path(folder)
        )
        return Path(folder, "out.ptx").read_text()


def _with_functions(ptx: str, functions: str) -> str:
    """Declare the functions of a module on one line of another's head, and define them at its end."""
    functions = without_comments(functions)
    start = _ADDRESS_SIZE.search(functions)
    if start is None:
        raise EmulationError("nvcc gave a PTX module without a head")
    definitions = functions[start.end() :].strip()
    declarations = [
        re.sub(r"\s+", " ", head).strip() + ";" for head in re.findall(r"\.visible \.func[^{;]*(?=\{)", definitions)
    ]
    ptx = _ADDRESS_SIZE.sub(lambda m: f"{m[0]} {' '.join(declarations)}", ptx, count=1)
    return ptx.rstrip("\n\0") + "\n\n" + definitions + "\n"


def assemble(module: Retargeted, original: str | None = None) -> bytes:
    """The cubin of a module.

    Args:
        module: what `retarget` gave.
        original: the PTX before, to quote in errors.

    Raises:
        UnknownInstructionError: the architecture lacks an instruction, or the assembler does not know it.
        ToolError: any other complaint of ptxas.
        ToolMissingError: there is no ptxas.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        # The kernel's own version may be later than what this assembler knows, and that of stand-ins later than it.
        source.write_text(_VERSION.sub(rf"\g<1>{_latest_version()}", module.ptx, count=1).rstrip("\0"))
        try:
            tools.run("ptxas", f"-arch={module.arch}", source, "-o", cubin)
        except ToolError as error:
            raise _explained(str(error), module, original or module.ptx) from None
        return cubin.read_bytes()


@functools.cache
def _latest_version() -> str:
    """The latest PTX version that ptxas knows, `9.0`: it says so when asked for one that never was."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "none.ptx").write_text(".version 99.0\n.target sm_90a\n.address_size 64\n")
        try:
            tools.run("ptxas", "-arch=sm_90a", "none.ptx", "-o", "none.cubin", folder=Path(folder))
        except ToolError as error:
            if found := re.search(r"current version is '(\d+\.\d+)'", str(error)):
                return found[1]
            raise
    raise EmulationError("ptxas took a module of PTX version 99.0")


_REFUSED = re.compile(
    r"line (\d+); error\s*: (.*?(?:not supported on .target|requires .target|Unknown modifier|Unexpected instruction"
    r"|Illegal modifier|Not a name of any known instruction|requires PTX ISA).*)"
)


def _explained(printed: str, module: Retargeted, original: str) -> EmulationError:
    """The error for what ptxas printed."""
    refused = [(int(line), why) for line, why in _REFUSED.findall(printed)]
    if not refused:
        return ToolError(printed)
    opcodes = {instruction.line: instruction.opcode for instruction in instructions(module.ptx)}
    lines = original.splitlines()
    found = dict.fromkeys(
        f"{opcodes.get(line) or lines[line - 1].strip()} (line {line}): {why}"
        for line, why in refused
        if line <= len(lines)
    )
    return UnknownInstructionError(f"{module.arch} has no\n  " + "\n  ".join(found)) if found else ToolError(printed)
