"""What takes the place of each instruction of sm_100 and later that a kernel for sm_120a may have.

Arithmetic that takes more than a few instructions is a call of a stand-in, a function compiled from `stand_ins.cuh`;
the rest is written out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from b12x_conformance.emulation.body import Body
from b12x_conformance.emulation.ptx import Instruction, vector

_ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
_PAIRS = {f"{element}x2": f"b12x::{element.upper()}" for element in _ELEMENTS}
_NARROW_PAIRS = ("e3m2x2", "e2m3x2", "e2m1x2")


@dataclass(frozen=True)
class StandIn:
    """A device function of 32-bit registers.

    Attributes:
        name: of the PTX function, made of the instruction's opcode.
        expression: what it calls in `stand_ins.cuh`.
        inputs, outputs: how many registers it takes and gives.
    """

    name: str
    expression: str
    inputs: int
    outputs: int

    @property
    def source(self) -> str:
        """Its definition in CUDA C++."""
        parameters = ", ".join(f"uint32_t x{i}" for i in range(self.inputs))
        arguments = ", ".join(f"x{i}" for i in range(self.inputs))
        result = f"b12x::Registers<{self.outputs}>" if self.outputs else "void"
        call = f"{self.expression}({arguments});"
        return f'extern "C" __device__ __noinline__ {result} {self.name}({parameters}) {{ return {call} }}'


@dataclass(frozen=True)
class Replacement:
    """PTX in place of an instruction, and the function that it calls, if any."""

    text: str
    stand_in: StandIn | None = None


def replacement(instruction: Instruction) -> Replacement | None:
    """What runs in place of an instruction on sm_90a; None for one that stays, known there or not."""
    rule = _RULES.get(instruction.name)
    return None if rule is None else rule(instruction)


def _call(
    i: Instruction, expression: str, inputs: list[str], outputs: list[str], body: Body | None = None
) -> Replacement:
    """Replace `i` by a call; `inputs` are operands of `i`, or registers of `body`."""
    name = "b12x_" + re.sub(r"\W+", "_", i.opcode)
    stand_in = StandIn(name, expression, len(inputs), len(outputs))
    body = body or Body(i)
    body.call(name, inputs, outputs, uniform="sync" in i.modifiers)
    return Replacement(body.text(), stand_in)


def _mma(i: Instruction) -> Replacement | None:
    kind = next((m.removeprefix("kind::") for m in i.modifiers if m.startswith("kind::")), None)
    if kind is None or "sp" in i.modifiers or "sp::ordered_metadata" in i.modifiers:
        return None
    types = [m for m in i.modifiers if m in (*_ELEMENTS, "f32", "f16", "ue8m0", "ue4m3")]
    d, a, b, c, *scales = i.operands
    inputs = [*vector(a), *vector(b), *vector(c), *(register for operand in scales for register in vector(operand))]
    outputs = vector(d)
    a_type, b_type = (f"b12x::{t.upper()}" for t in types[1:3])
    pair = f"<{a_type}, {b_type}>"
    if kind == "f8f6f4":
        if types[0] != types[3]:
            return None
        return _call(i, ("b12x::f8f6f4" if types[0] == "f32" else "b12x::f8f6f4_fp16") + pair, inputs, outputs)
    if kind == "mxf8f6f4":
        return _call(i, "b12x::mxf8f6f4" + pair, inputs, outputs)
    if kind in ("mxf4", "mxf4nvf4"):
        four = "scale_vec::4X" in i.modifiers
        if types[4] == "ue4m3":
            return _call(i, "b12x::mxf4nvf4_ue4m3", inputs, outputs) if four else None
        return _call(i, f"b12x::mxf4_ue8m0<{4 if four else 2}>", inputs, outputs)
    return None


def _ldmatrix(i: Instruction) -> Replacement | None:
    source = {"b4x16_p64": 4, "b6x16_p32": 6, "b8": 8}.get(i.modifiers[-1])
    shape = next((m for m in i.modifiers if m in ("m8n16", "m16n16")), None)
    if source is None or shape is None:
        return None
    number = next(int(m[1:]) for m in i.modifiers if re.fullmatch(r"x\d", m))
    body = Body(i)
    inputs = [body.shared_address(i.operands[1])]
    return _call(i, f"b12x::ldmatrix_{shape}<{number}, {source}>", inputs, vector(i.operands[0]), body)


def _stmatrix(i: Instruction) -> Replacement | None:
    if "m16n8" not in i.modifiers:
        return None
    body = Body(i)
    inputs = [body.shared_address(i.operands[0]), *vector(i.operands[1])]
    return _call(i, "b12x::stmatrix_m16n8", inputs, [], body)


def _cvt(i: Instruction) -> Replacement | None:
    if len(i.modifiers) < 2 or "rs" in i.modifiers:
        return None
    to, source = i.modifiers[-2:]
    flags = {True: "true", False: "false"}
    relu, satfinite = flags["relu" in i.modifiers], flags["satfinite" in i.modifiers]
    sources = list(i.operands[1:])
    if "scaled::n2::ue8m0" in i.modifiers:
        if source not in _PAIRS or to != "bf16x2":
            return None
        expression = f"b12x::decode_scaled_bf16x2<{_PAIRS[source]}, {relu}, {satfinite}>"
        return _call(i, expression, sources, [i.operands[0]])
    if to == "ue8m0x2" and source in ("f32", "bf16x2"):
        up = flags["rp" in i.modifiers]
        return _call(i, f"b12x::encode_ue8m0_{source}<{up}, {satfinite}>", sources, [i.operands[0]])
    if source == "ue8m0x2" and to == "bf16x2":
        return _call(i, "b12x::decode_ue8m0", sources, [i.operands[0]])
    if (to in _NARROW_PAIRS and source in ("f32", "f16x2", "bf16x2")) or (to in _PAIRS and source == "bf16x2"):
        return _call(i, f"b12x::encode_{source}<{_PAIRS[to]}, {relu}>", sources, [i.operands[0]])
    if (source in _NARROW_PAIRS and to in ("f16x2", "bf16x2")) or (source in _PAIRS and to == "bf16x2"):
        return _call(i, f"b12x::decode_{to}<{_PAIRS[source]}, {relu}>", sources, [i.operands[0]])
    return None


def _arithmetic(i: Instruction) -> Replacement | None:
    kind = i.modifiers[-1] if i.modifiers else ""
    if kind == "f32x2":
        return _pairwise(i)
    if kind in ("f16", "bf16") and "f32" in i.modifiers:
        return _mixed(i)
    return None


def _pairwise(i: Instruction) -> Replacement:
    """`add.f32x2` and the like: the two halves one after the other, each rounded as the whole says."""
    body = Body(i)
    # Without a rounding of its own, an addition after a multiplication may be fused with it.
    modifiers = (
        i.modifiers[:-1] if any(m in ("rn", "rz", "rm", "rp") for m in i.modifiers) else ("rn", *i.modifiers[:-1])
    )
    halves = []
    for operand in i.operands[1:]:
        pair = [body.register("b32"), body.register("b32")]
        body.emit(f"mov.b64 {{{pair[0]}, {pair[1]}}}, {operand}")
        halves.append(pair)
    results = [body.register("b32"), body.register("b32")]
    for half, result in enumerate(results):
        body.emit(f"{'.'.join((i.name, *modifiers, 'f32'))} {result}, {', '.join(pair[half] for pair in halves)}")
    body.emit(f"mov.b64 {i.operands[0]}, {{{results[0]}, {results[1]}}}")
    return Replacement(body.text())


def _mixed(i: Instruction) -> Replacement:
    """`add.f32.bf16 d, a, c` and `fma.f32.f16 d, a, b, c`: all sources but the last are 16-bit, widened exactly."""
    body = Body(i)
    wide = []
    for operand in i.operands[1:-1]:
        wide.append(body.register("f32"))
        body.emit(f"cvt.f32.{i.modifiers[-1]} {wide[-1]}, {operand}")
    modifiers = list(i.modifiers[:-1])
    if not any(m in ("rn", "rz", "rm", "rp") for m in modifiers):
        modifiers.insert(0, "rn")
    body.emit(f"{'.'.join((i.name, *modifiers))} {', '.join((i.operands[0], *wide, i.operands[-1]))}")
    return Replacement(body.text())


def _three_operands(i: Instruction) -> Replacement | None:
    """`max.f32 d, a, b, c` and `min`: of two, then of that and the third."""
    if len(i.operands) != 4 or i.modifiers[-1] != "f32":
        return None
    body = Body(i)
    sources = list(i.operands[1:])
    if "abs" in i.modifiers:
        for place, operand in enumerate(sources):
            sources[place] = body.register("f32")
            body.emit(f"abs.f32 {sources[place]}, {operand}")
    opcode = ".".join((i.name, *(m for m in i.modifiers if m != "abs")))
    first = body.register("f32")
    body.emit(f"{opcode} {first}, {sources[0]}, {sources[1]}")
    body.emit(f"{opcode} {i.operands[0]}, {first}, {sources[2]}")
    return Replacement(body.text())


def _wide_access(i: Instruction) -> Replacement | None:
    """Loads and stores of 256 bits: two of 128 bits. Which of them comes first is as free as inside the one."""
    bits = int(re.sub(r"\D", "", i.modifiers[-1]) or 0)
    size = next((int(m[1:]) for m in i.modifiers if re.fullmatch(r"v\d", m)), 1)
    if bits * size != 256:
        return None
    body = Body(i)
    # Priorities of eviction from the second-level cache exist for accesses of 256 bits only.
    kept = (m for m in i.modifiers if not re.fullmatch(r"L2::evict_(first|last|normal)", m))
    opcode = ".".join((i.name, *(f"v{size // 2}" if re.fullmatch(r"v\d", m) else m for m in kept)))
    loads = i.name == "ld"
    registers = vector(i.operands[0 if loads else 1])
    base, offset = body.address(i.operands[1 if loads else 0])
    # The first of two loads may overwrite the register of the address.
    place = body.register(i.type_of(base) or "b64")
    body.emit(f"mov.{'b32' if i.type_of(base) in ('b32', 'u32', 's32') else 'b64'} {place}, {base}")
    for half in range(2):
        part = "{" + ", ".join(registers[half * size // 2 : (half + 1) * size // 2]) + "}"
        address = f"[{place}+{int(offset, 0) + 16 * half}]"
        body.emit(f"{opcode} {', '.join(((part, address) if loads else (address, part)) + i.operands[2:])}")
    return Replacement(body.text())


_RULES: dict[str, Callable[[Instruction], Replacement | None]] = {
    "mma": _mma,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "cvt": _cvt,
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "fma": _arithmetic,
    "max": _three_operands,
    "min": _three_operands,
    "ld": _wide_access,
    "st": _wide_access,
}
