"""Whether a main loop says that it has read a stage of the ring before it has.

Instructions issue in order, but a load from shared memory ends later, and an arrival at a barrier does not wait for it.
What does wait is an instruction that uses what was loaded. So behind a load there must be one before the arrival that
gives the stage back, or the copy engine may overwrite what is still to be read.
"""

from __future__ import annotations

import re

from b12x_core.tools.main_loop import MATRIX, Instruction, Loop

_REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
_MATRIX_REGISTERS = (4, 4, 2, 4, 1, 1)  # of D, A, B, C and the scales of A and B


def _span(first: str | None, count: int) -> set[int]:
    return set() if first is None else set(range(int(first), int(first) + count))


def _loaded(instruction: Instruction) -> set[int]:
    """Registers that a load from shared memory gives."""
    found = _REGISTER.search(instruction.operands)
    return _span(found and found[1], instruction.shared_bytes // 128)


def _touched(instruction: Instruction) -> set[int]:
    """Registers that an instruction waits for: its operands, and its results, which a load must not overwrite later."""
    if instruction.name not in MATRIX:
        width = 4 if ".128" in instruction.opcode else 2 if ".64" in instruction.opcode else 1
        return {r for first in _REGISTER.findall(instruction.operands) for r in _span(first, width)}
    touched: set[int] = set()
    for operand, count in zip(instruction.operands.split(","), _MATRIX_REGISTERS, strict=False):
        found = _REGISTER.search(operand)
        touched |= _span(found and found[1], count)
    return touched


def early_arrivals(loop: Loop, lag: int) -> list[str]:
    """Loads that may still be on their way when the loop arrives at the barrier of the stage that they read.

    Args:
        loop: a main loop.
        lag: arrivals between the last load from a stage and the one that gives it back: 0 where the loop gives back the
            stage that it has just read, 1 where it has begun to read the next one.

    Returns:
        The load and its operands, for each.
    """
    waiting: list[tuple[Instruction, set[int], int]] = []  # with the arrivals that were before it
    arrivals, found = 0, []
    for instruction in loop.code * (lag + 2):
        if instruction.arrives:
            late = [load for load, _, before in waiting if arrivals - before >= lag]
            found += [f"{load.opcode}{load.operands}".strip() for load in late]
            arrivals += 1
            continue
        touched = _touched(instruction)
        waiting = [entry for entry in waiting if not entry[1] & touched]
        if instruction.name in ("LDS", "LDSM"):
            waiting.append((instruction, _loaded(instruction), arrivals))
    return list(dict.fromkeys(found))
