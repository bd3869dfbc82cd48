"""Finding instructions in PTX."""

from __future__ import annotations

import pytest
from b12x_conformance.emulation.ptx import instructions, vector, without_comments
from ptx_modules import module


def names(ptx: str) -> list[str]:
    return [i.opcode for i in instructions(ptx)]


def test_opcode_operands_guard_and_line() -> None:
    ptx = module(
        "@!%p1 mma.sync.aligned.kind::mxf4.block_scale\n  {%f0,%f1 , %f2,\t%f3}, { %r0 }, [%rd1+16], 0f00000000 ;"
    )
    found, last = instructions(ptx)
    assert (found.name, found.modifiers) == ("mma", ("sync", "aligned", "kind::mxf4", "block_scale"))
    assert found.operands == ("{%f0,%f1 , %f2, %f3}", "{ %r0 }", "[%rd1+16]", "0f00000000")
    assert (found.guard, found.line, last.line) == ("!%p1", 8, 10)
    assert ptx[found.start : found.end].startswith("@!%p1 mma")
    assert ptx[found.start : found.end].endswith(";")
    assert vector(found.operands[0]) == ["%f0", "%f1", "%f2", "%f3"]
    assert vector("%r1") == ["%r1"]


def test_modifiers_may_stand_apart() -> None:
    assert names(module("cvt .rn .satfinite\n .e2m1x2.f32 %b, %f0, %f1;"))[0] == "cvt.rn.satfinite.e2m1x2.f32"


def test_comments_strings_and_directives_are_passed() -> None:
    body = """
    // add.f32x2 %rd0, %rd1, %rd2;
    /* mul.f32x2 %rd0,
       %rd1, %rd2; */
    .loc 1 2 3
    .pragma "fma.f32x2 x; // y";
    $L__BB0_1:
    mov.u32 %r0, %tid.x; // begin inline asm
    call_0: .callprototype (.param .b32 _) _ (.param .b32 _);
    @%p0 bra $L__BB0_1;
    """
    ptx = (
        '.file 1 "a b; c"\n.global .align 4 .b8 t[4] = {1, 2, 3, 4};\n'
        + module(body)
        + "\n.section .debug_x { .b8 1 }\n"
    )
    assert names(ptx) == ["mov.u32", "bra", "ret"]
    assert len(without_comments(ptx)) == len(ptx)


def test_types_of_registers_follow_scopes() -> None:
    inner, outer, _ = instructions(module("{ .reg .b16 x, %r3; .reg .f32 f<4>; mov.b16 x, %r3; }\nmov.b32 %r3, %r4;"))
    assert [inner.type_of(name) for name in ("x", "%r3", "%r12", "f2", "%rs1", "%h", "%b")] == [
        *("b16", "b16", "b32", "f32", "b16", "b16", "b8")
    ]
    assert [outer.type_of(name) for name in ("x", "%r3", "f2", "7", "%tid.x")] == [None, "b32", None, None, None]


def test_functions_and_declarations() -> None:
    ptx = ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .func (.param .b32 r) f(.param .b32 a);\n"
    ptx += ".visible .func (.param .b32 r) g(\n.param .b32 a\n)\n{\n.reg .b32 %r<2>;\nret;\n}\n"
    ptx += ".extern .shared .align 16 .b8 s[];\n"
    assert names(ptx) == ["ret"]


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        ("{ ret; }}", "closes nothing"),
        ("{ ret;", "left open"),
        ("mov.u32 a, b", "without an end"),
        ("{\n$$$ 5;\n}", "line 2: no instruction"),
    ],
)
def test_errors_name_the_line(ptx: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        instructions(ptx)
