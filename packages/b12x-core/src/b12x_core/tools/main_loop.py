"""The loop in which a kernel multiplies, found in its machine code, and what an iteration of it issues.

A multiprocessor has four schedulers, and each issues one instruction of a warp a cycle at most. A matrix instruction
keeps the scheduler's matrix unit busy for several cycles; what else an iteration issues must fit beside it, or the loop
cannot reach the unit's rate, however many warps run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

MATRIX = ("HMMA", "QMMA", "OMMA", "IMMA")

MATRIX_CYCLES = 16
"""Cycles for which an `m16n8` matrix instruction of any width keeps one of the four matrix units of SM120 busy.

From the rates that NVIDIA states for an RTX PRO 6000 Blackwell (188 multiprocessors, 2.617 GHz), dense, with fp32 sums:
503.8 TFLOP/s in 16 bits (K 16), 1007.6 in 8 bits (K 32) and 2015.2 in 4 bits (K 64) are 256, 512 and 1024 operations a
cycle for each unit. On an RTX 5090 others measured (main-horse.github.io/posts/5090-mm-perf) half as much for mxf8 as
for mxf4 and nvf4, as it must be, and for 8 bits without block scales half of mxf8, which is a limit of GeForce.
"""

SHARED_BYTES_A_CYCLE = 128
SCHEDULERS = 4

_CLASSES: dict[str, tuple[str, ...]] = {
    "matrix": MATRIX,
    "ldmatrix": ("LDSM",),
    "shared": ("LDS", "STS", "ATOMS"),
    "global": (
        "LDG",
        "STG",
        "LDGSTS",
        "RED",
        "ATOM",
        "UBLKCP",
        "UBLKPF",
        "UTMALDG",
        "UTMASTG",
        "LDC",
        "LDCU",
        "LD",
        "ST",
    ),
    "conversion": ("F2F", "F2FP", "I2F", "I2FP", "F2I", "F2IP", "FRND"),
    "float": ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "FSETP", "FSEL", "FMNMX", "HMNMX2", "MUFU", "FCHK"),
    "integer": (
        *(
            "IADD",
            "IADD3",
            "IMAD",
            "ISETP",
            "IMNMX",
            "VIMNMX",
            "VIADD",
            "IABS",
            "LEA",
            "LOP3",
            "PLOP3",
            "LOP",
            "SHF",
            "SHL",
        ),
        *("SHR", "SEL", "PRMT", "BMSK", "SGXT", "FLO", "POPC", "BREV", "IDP", "VIADDMNMX"),
    ),
    "synchronization": (
        "SYNCS",
        "BAR",
        "WARPSYNC",
        "MEMBAR",
        "FENCE",
        "UCGABAR_ARV",
        "UCGABAR_WAIT",
        "NANOSLEEP",
        "SHFL",
    ),
}
_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names}
CLASSES = (*_CLASSES, "uniform", "other")
"""Kinds of instructions. "uniform" are those of the scalar unit that a warp shares; "other" has moves and branches."""

_LABEL = re.compile(r"^\.(L_\w+):")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_TARGET = re.compile(r"`\(\.(L_\w+)\)")
_CONDITION = re.compile(r"^\s*!?U?P\d")


@dataclass(frozen=True)
class Instruction:
    """One of machine code: its opcode with modifiers, its guard or None, and its operands as text."""

    opcode: str
    guard: str | None
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def kind(self) -> str:
        """One of `CLASSES`."""
        if self.opcode.startswith("IMAD.MOV"):
            return "other"
        kind = _CLASS_OF.get(self.name)
        return kind or ("uniform" if self.name.startswith("U") or self.name == "R2UR" else "other")

    @property
    def arrives(self) -> bool:
        """Whether it arrives at a barrier in shared memory."""
        return self.opcode.startswith("SYNCS.ARRIVE")

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory's width that a warp takes, if no two lanes read the same: an upper bound."""
        if self.name == "LDSM":
            return 128 * int(self.opcode[-1]) if self.opcode[-1] in "24" else 128
        if self.name not in ("LDS", "STS"):
            return 0
        width = next((int(part) for part in self.opcode.split(".") if part in ("64", "128")), 32)
        return 4 * width


@dataclass
class _Block:
    code: list[Instruction]
    successors: list[int]


@dataclass(frozen=True)
class Loop:
    """An iteration of the loop that multiplies; loops within it that only wait are left out.

    Attributes:
        counts: how many instructions of each of `CLASSES`.
        matrix: matrix instruction with modifiers -> how often.
        shared_bytes: upper bound of the bytes that its loads and stores of shared memory take of its width.
        code: its instructions, in the order in which they lie in memory.
    """

    counts: dict[str, int]
    matrix: dict[str, int]
    shared_bytes: int
    code: tuple[Instruction, ...]

    @property
    def arrivals(self) -> int:
        """How often it arrives at a barrier in shared memory."""
        return sum(instruction.arrives for instruction in self.code)

    @property
    def matrix_count(self) -> int:
        """Matrix instructions."""
        return self.counts["matrix"]

    @property
    def per_matrix(self) -> dict[str, float]:
        """Instructions of each kind for each matrix instruction."""
        return {kind: self.counts[kind] / self.matrix_count for kind in CLASSES}

    @property
    def issue_bound(self) -> float:
        """How many times the rate of the matrix unit the schedulers could issue; below 1 they are what limits it."""
        return MATRIX_CYCLES * self.matrix_count / sum(self.counts.values())

    @property
    def shared_bound(self) -> float:
        """For how many times the rate of the matrix units shared memory can deliver operands; infinite if it need not.

        What the copy engine writes into shared memory meanwhile is not in it.
        """
        cycles = SCHEDULERS * self.shared_bytes / SHARED_BYTES_A_CYCLE
        return MATRIX_CYCLES * self.matrix_count / cycles if cycles else math.inf


def _blocks(sass: str) -> list[_Block]:
    """The basic blocks of the first function that multiplies, in the order of the code."""
    function = next((part for part in sass.split("\n.text.")[1:] if any(f" {name}." in part for name in MATRIX)), "")
    blocks: list[_Block] = [_Block([], [])]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    falls = True
    for line in function.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1].code:
                if falls:
                    blocks[-1].successors.append(len(blocks))
                blocks.append(_Block([], []))
            labels[label[1]] = len(blocks) - 1
            falls = True
            continue
        found = _LINE.search(line)
        if found is None:
            continue
        instruction = Instruction(found[3], found[2], found[4])
        blocks[-1].code.append(instruction)
        if instruction.name not in ("BRA", "EXIT", "RET", "BRX", "JMP"):
            continue
        conditional = found[2] is not None or _CONDITION.match(found[4]) is not None
        # BRA.DIV goes where lanes have parted, BRA.CONV where they have not; neither is the usual way.
        unusual = instruction.opcode.startswith(("BRA.DIV", "BRA.CONV"))
        target = _TARGET.search(found[4])
        if target and not unusual:
            jumps.append((len(blocks) - 1, target[1]))
        if conditional or unusual:
            blocks[-1].successors.append(len(blocks))
        blocks.append(_Block([], []))
        falls = True
    for block, label_name in jumps:
        if label_name in labels:
            blocks[block].successors.append(labels[label_name])
    for block_ in blocks:
        block_.successors = [s for s in block_.successors if s < len(blocks)]
    return blocks


def _dominators(blocks: list[_Block]) -> list[set[int]]:
    """For each block the blocks that every way to it passes; none for what cannot be reached."""
    before: list[set[int]] = [set() for _ in blocks]
    order, seen = [], {0}
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(blocks[0].successors))]
    while stack:
        at, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            order.append(at)
            stack.pop()
            continue
        before[following].add(at)
        if following not in seen:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    order.reverse()
    found: list[set[int]] = [set() for _ in blocks]
    for block in order:
        found[block] = set(order)
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = set.intersection(*(found[b] for b in before[block])) | {block}
            if new != found[block]:
                found[block], changed = new, True
    return found


def _loops(blocks: list[_Block]) -> dict[int, set[int]]:
    """First block of each loop -> its blocks."""
    dominators = _dominators(blocks)
    before: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for following in block.successors:
            before.setdefault(following, []).append(number)
    found: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for head in block.successors:
            if head not in dominators[number]:
                continue
            body, waiting = found.setdefault(head, {head}), [number]
            while waiting:
                at = waiting.pop()
                if at not in body and dominators[at]:
                    body.add(at)
                    waiting += before.get(at, [])
    return found


def main_loop(sass: str) -> Loop | None:
    """Of the loops that multiply and have no other such loop in them, the one with most matrix instructions.

    Args:
        sass: what `sass.disassemble` gave.

    Returns:
        None if no loop multiplies.
    """
    blocks = _blocks(sass)
    loops = _loops(blocks)

    def matrix(body: set[int]) -> int:
        return sum(i.kind == "matrix" for block in body for i in blocks[block].code)

    multiplying = [body for body in loops.values() if matrix(body)]
    innermost = [body for body in multiplying if not any(other < body for other in multiplying)]
    if not innermost:
        return None
    body = max(innermost, key=matrix)
    for other in loops.values():
        if other < body:
            body = body - other
    code = [instruction for block in sorted(body) for instruction in blocks[block].code]
    kinds = Counter(instruction.kind for instruction in code)
    return Loop(
        {kind: kinds[kind] for kind in CLASSES},
        dict(Counter(i.opcode for i in code if i.kind == "matrix")),
        sum(i.shared_bytes for i in code),
        tuple(code),
    )
