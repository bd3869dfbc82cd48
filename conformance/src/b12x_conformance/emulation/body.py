"""Writing the PTX that takes the place of an instruction."""

from __future__ import annotations

import re
import struct

from b12x_conformance.emulation.ptx import Instruction

_WIDTHS = {"f16x2": 32, "bf16x2": 32, "pred": 1}


def width(kind: str) -> int:
    """Bits of a register type, 32 for `b32`."""
    return _WIDTHS.get(kind) or int(re.sub(r"\D", "", kind))


class Body:
    """Instructions in a scope of their own, run under the guard of the instruction that they replace.

    Everything declared here starts with `%b12x_`, so that no name of the kernel is hidden.
    """

    def __init__(self, instruction: Instruction) -> None:
        self.of = instruction
        self._declared: list[str] = []
        self._lines: list[str] = []

    def register(self, kind: str) -> str:
        """A new register of a type such as `b32`."""
        name = f"%b12x_{len(self._declared)}"
        self._declared.append(f".reg .{kind} {name};")
        return name

    def emit(self, line: str) -> None:
        """Add one statement, given without its semicolon."""
        self._lines.append(line + ";")

    def text(self) -> str:
        """The whole scope, on one line."""
        lines = [*self._declared, *self._lines]
        if self.of.guard:
            # Labels are local to a scope.
            skip = "@" + (self.of.guard[1:] if self.of.guard.startswith("!") else "!" + self.of.guard)
            lines = [*self._declared, f"{skip} bra $b12x_skip;", *self._lines, "$b12x_skip:"]
        return " ".join(["{", *lines, "}"])

    def word(self, operand: str) -> str:
        """A source operand of 8, 16, 32 or 64 bits, or a number, as 32 bits; upper bits 0 or left out."""
        kind = self.of.type_of(operand)
        if kind is None:
            if operand.startswith("%"):  # a special register such as %laneid
                return self._through("mov.u32", "b32", operand)
            return _number(operand)
        if width(kind) == 32:
            return operand
        if kind in ("f16", "bf16"):
            operand = self._through("mov.b16", "b16", operand)
        return self._through(f"cvt.u32.u{width(kind)}", "b32", operand)

    def _through(self, opcode: str, kind: str, operand: str) -> str:
        out = self.register(kind)
        self.emit(f"{opcode} {out}, {operand}")
        return out

    def set(self, destination: str, word: str) -> None:
        """Give a register of 8, 16, 32 or 64 bits the value of 32 bits; `_` takes nothing."""
        kind = self.of.type_of(destination)
        if destination == "_":
            return
        if kind is None or width(kind) == 32:
            self.emit(f"mov.b32 {destination}, {word}")
        elif kind in ("f16", "bf16"):
            self.emit(f"mov.b16 {destination}, {self._through('cvt.u16.u32', 'b16', word)}")
        else:
            self.emit(f"cvt.u{width(kind)}.u32 {destination}, {word}")

    def address(self, operand: str) -> tuple[str, str]:
        """Base and offset of an address operand `[base]` or `[base+offset]`; offset `"0"` where there is none."""
        base, _, offset = operand.strip("[] ").partition("+")
        return base.strip(), offset.strip() or "0"

    def shared_address(self, operand: str) -> str:
        """An address operand as a 32-bit address in shared memory, offset included."""
        base, offset = self.address(operand)
        kind = self.of.type_of(base)
        if kind is None:
            base = self._through("mov.u32", "b32", base)  # the name of a shared variable
        elif width(kind) == 64:
            if not any(m.startswith("shared") for m in self.of.modifiers):
                base = self._through("cvta.to.shared.u64", "b64", base)
            base = self._through("cvt.u32.u64", "b32", base)
        if offset == "0":
            return base
        out = self.register("b32")
        self.emit(f"add.s32 {out}, {base}, {offset}")
        return out

    def call(self, function: str, inputs: list[str], outputs: list[str], uniform: bool) -> None:
        """Call a function of 32-bit values.

        Args:
            function: its name.
            inputs: source operands; their 32 bits are given.
            outputs: destination operands.
            uniform: whether all threads of the warp call it together.
        """
        words = [self.word(operand) for operand in inputs]
        names = [f"%b12x_in{i}" for i in range(len(words))]
        for name, word in zip(names, words, strict=True):
            self._declared.append(f".param .b32 {name};")
            self.emit(f"st.param.b32 [{name}], {word}")
        opcode = "call.uni" if uniform else "call"
        if not outputs:
            self.emit(f"{opcode} {function}, ({', '.join(names)})")
            return
        self._declared.append(f".param .align 4 .b8 %b12x_out[{4 * len(outputs)}];")
        self.emit(f"{opcode} (%b12x_out), {function}, ({', '.join(names)})")
        results = [self.register("b32") for _ in outputs]
        for i, result in enumerate(results):
            self.emit(f"ld.param.b32 {result}, [%b12x_out+{4 * i}]")
        for output, result in zip(outputs, results, strict=True):
            self.set(output, result)


def _number(literal: str) -> str:
    """A number as it may be stored in 32 bits of no type: `0f3F800000` and `1.0` become `0x3F800000`."""
    if literal.lower().startswith("0f"):
        return "0x" + literal[2:]
    if re.fullmatch(r"[-+]?\d*\.\d*(e[-+]?\d+)?", literal, re.IGNORECASE):
        return hex(struct.unpack("<I", struct.pack("<f", float(literal)))[0])
    return literal
