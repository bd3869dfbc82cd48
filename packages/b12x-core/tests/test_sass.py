"""Reading what the assembler made of a kernel. The kernels themselves are looked at by `kernel_tests`."""

from __future__ import annotations

import struct

import pytest
from b12x_core.errors import B12xError
from b12x_core.tools import sass

LAUNCH = """
    %7 = llvm.mlir.constant(64 : i32) : i32
    %8 = llvm.mlir.constant({size} : i64) : i64
    %9 = llvm.alloca %6 x !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)> : (i32) -> !llvm.ptr
    %12 = llvm.getelementptr %9[0, 1, 0] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>
    llvm.store %7, %12 : i32, !llvm.ptr
    %15 = llvm.getelementptr %9[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>
    llvm.store %8, %15 : i64, !llvm.ptr
"""  # noqa: E501


def test_dynamic_shared_memory_is_read_from_the_launch() -> None:
    assert sass.dynamic_shared(LAUNCH.format(size=76800)) == 76800


def test_a_launch_without_a_constant_size_is_refused() -> None:
    with pytest.raises(B12xError, match="no launch with a constant size"):
        sass.dynamic_shared("llvm.func @f() { llvm.return }")


def test_attributes_with_and_without_payload() -> None:
    data = (
        struct.pack("<BBHII", 4, 0x2F, 8, 7, 168)
        + struct.pack("<BBH", 3, 0x1B, 255)
        + struct.pack("<BBHI", 4, 0x37, 4, 1)
    )
    assert sass._attributes(data) == [(0x2F, struct.pack("<II", 7, 168)), (0x1B, b""), (0x37, struct.pack("<I", 1))]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("        /*00c0*/                   QMMA.16832.F32.E4M3.E4M3 R8, R8, R6, RZ ;", "QMMA.16832.F32.E4M3.E4M3"),
        ("        /*1a30*/              @!P0 LDL R4, [R1] ;", "LDL"),
        ("        /*0050*/             @UP1 UIADD3 UR4, UR4, 0x1, URZ ;", "UIADD3"),
    ],
)
def test_instructions_are_found_behind_predicates(line: str, name: str) -> None:
    assert sass._INSTRUCTION.findall(line) == [name]
