"""Finding the instructions of a PTX module: opcode, operands, guard, and the registers in scope.

Only as much of the language as it takes to replace single instructions: comments and strings are passed over, braces
open scopes, and every statement that is neither a directive nor a label is an instruction.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_LABEL = re.compile(r"[\w$%]+\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*([\w$%]+)\s*")
_OPCODE = re.compile(r"[a-z]\w*(?:\s*\.\s*\w+(?:::\w+)*)*")
_TO_END_OF_LINE = (".version", ".target", ".address_size", ".file", ".loc")
_REGISTERS = re.compile(r"\.reg\s*(\.\w+)\s+(.*);", re.DOTALL)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a module.

    Attributes:
        name: the opcode before its first dot, `mma`.
        modifiers: what follows, `("sync", "aligned", ...)`.
        operands: as written, outer spaces left out; vectors with their braces, addresses with their brackets.
        guard: `""`, or the predicate that the instruction runs under, `"%p1"` or `"!%p1"`.
        start, end: where it stands in the text, semicolon included.
        line: number of its first line, from 1.
        types: name or name prefix -> type of the registers declared around it, such as `{"%r": "b32"}`.
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    start: int
    end: int
    line: int
    types: dict[str, str] = field(repr=False, compare=False, default_factory=dict)

    @property
    def opcode(self) -> str:
        """Name and modifiers with their dots."""
        return ".".join((self.name, *self.modifiers))

    def type_of(self, register: str) -> str | None:
        """The declared type of a register, `b32` for example; None for what is no register."""
        found = self.types.get(register)
        if found is None:
            # `.reg .b32 %r<10>` declares %r0 to %r9; the prefix itself may end in digits.
            for cut in range(len(register) - 1, 0, -1):
                if not register[cut].isdigit():
                    break
                found = self.types.get(register[:cut] + "<")
                if found is not None:
                    break
        return found


def vector(operand: str) -> list[str]:
    """The elements of a vector operand `{a, b}`, or of a scalar as a list of one."""
    if operand.startswith("{"):
        operand = operand[1:-1]
    return [part.strip() for part in operand.split(",")]


def without_comments(text: str) -> str:
    """The text with comments and strings blanked, every other character where it was."""
    return _COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def instructions(text: str) -> list[Instruction]:
    """All instructions of a module, in the order of the text.

    Raises:
        ValueError: braces do not match, or a statement is no instruction. Names the line.
    """
    shown = without_comments(text)
    newlines = [i for i, char in enumerate(shown) if char == "\n"]
    found: list[Instruction] = []
    scopes: list[dict[str, str]] = [{}]
    position = 0
    while (position := _skip_space(shown, position)) < len(shown):
        char = shown[position]
        if char == "{":
            scopes.append(dict(scopes[-1]))
            position += 1
        elif char == "}":
            scopes.pop()
            if not scopes:
                raise ValueError(f"PTX line {_line(shown, position)}: a brace closes nothing")
            position += 1
        elif char == ";":
            position += 1
        elif char == ".":
            position = _directive(shown, position, scopes[-1])
        elif label := _LABEL.match(shown, position):
            position = label.end()
            if shown.startswith(".", _skip_space(shown, position)):  # a call prototype or a table of branch targets
                position = _end(shown, position)
        else:
            end = _end(shown, position)
            line = bisect_right(newlines, position) + 1
            found.append(_instruction(shown[position : end - 1], position, end, line, scopes[-1]))
            position = end
    if len(scopes) != 1:
        raise ValueError("PTX: braces left open at the end of the module")
    return found


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _end(text: str, position: int) -> int:
    end = text.find(";", position)
    if end < 0:
        raise ValueError(f"PTX line {_line(text, position)}: a statement without an end")
    return end + 1


def _directive(text: str, position: int, scope: dict[str, str]) -> int:
    """Pass a directive, noting registers; returns where it ends."""
    if text.startswith(_TO_END_OF_LINE, position):
        end = text.find("\n", position)
        return len(text) if end < 0 else end
    if text.startswith(".section", position):
        return text.index("}", position) + 1
    end = text.find(";", position) + 1 or len(text)
    brace = text.find("{", position, end)
    if brace >= 0 and re.search(r"\.(entry|func)\b", text[position:brace]):
        return brace
    if declared := _REGISTERS.fullmatch(text, position, end):
        kind = declared[1].removeprefix(".")
        for name in declared[2].split(","):
            prefix, ranged, _ = name.strip().partition("<")
            scope[prefix.strip() + ranged] = kind
    return end


def _instruction(statement: str, start: int, end: int, line: int, types: dict[str, str]) -> Instruction:
    guard = ""
    if match := _GUARD.match(statement):
        guard = match[1] + match[2]
        statement = statement[match.end() :]
    opcode = _OPCODE.match(statement)
    if opcode is None:
        raise ValueError(f"PTX line {line}: no instruction: {' '.join(statement.split())[:60]!r}")
    name, *modifiers = re.sub(r"\s+", "", opcode[0]).split(".")
    operands = tuple(split(statement[opcode.end() :]))
    return Instruction(name, tuple(modifiers), operands, guard, start, end, line, types)


def split(text: str) -> list[str]:
    """Split at the commas outside of all brackets, each part with single spaces."""
    parts, depth, begin = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    parts.append(text[begin:])
    return [" ".join(part.split()) for part in parts if part.strip()]
