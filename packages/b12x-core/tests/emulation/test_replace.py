"""What takes the place of instructions."""

from __future__ import annotations

import pytest
from b12x_conformance.emulation.ptx import Instruction, instructions
from b12x_conformance.emulation.replace import Replacement, replacement
from ptx_modules import module

MMA = (
    "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
    "{%f0, %f1, _, %r1}, {%r0,%r1,%r2,%r3}, {%r4, %r5}, {%f4, 0f3F800000, %f6, %f7}, {%r6}, {%rs0, 1}, %r7, {0, %r8};"
)


def replaced(statement: str) -> Replacement:
    found = replacement(first(statement))
    assert found is not None
    # What is written must itself be PTX without anything left to replace.
    assert [i for i in instructions(found.text) if replacement(i)] == []
    return found


def first(statement: str) -> Instruction:
    return instructions(module(statement))[0]


def test_a_call_takes_every_kind_of_operand() -> None:
    new = replaced(MMA)
    assert new.stand_in is not None
    assert new.stand_in.expression == "b12x::mxf4nvf4_ue4m3"
    assert (new.stand_in.inputs, new.stand_in.outputs) == (16, 4)
    assert "cvt.u32.u16 %b12x_0, %rs0;" in new.text
    assert "st.param.b32 [%b12x_in7], 0x3F800000;" in new.text  # no type: 32 bits
    assert "st.param.b32 [%b12x_in13], 1;" not in new.text
    assert "st.param.b32 [%b12x_in12], 1;" in new.text
    assert "call.uni (%b12x_out), b12x_mma_sync" in new.text
    assert "mov.b32 %f0," in new.text
    assert "mov.b32 _" not in new.text


def test_operands_of_a_block_scaled_mma_in_order() -> None:
    text = replaced(MMA).text
    stored = [part.split(", ")[1].rstrip(";") for part in text.split("st.param.b32 ")[1:]]
    stored = [value.split(";")[0] for value in stored]
    assert stored == [
        *("%r0", "%r1", "%r2", "%r3", "%r4", "%r5", "%f4", "0x3F800000", "%f6", "%f7"),
        *("%r6", "%b12x_0", "1", "%r7", "0", "%r8"),
    ]


def test_a_guard_branches_around() -> None:
    assert "@!%p1 bra $b12x_skip;" in replaced("@%p1 cvt.rn.satfinite.e2m1x2.f32 %b, %f0, %f1;").text
    assert "@%p1 bra $b12x_skip;" in replaced("@!%p1 add.f32x2 %rd0, %rd1, %rd2;").text


def test_threads_that_diverge_call_without_uni() -> None:
    text = replaced("cvt.rn.satfinite.e2m1x2.f32 %b, %f0, %f1;").text
    assert "call (%b12x_out)" in text
    assert "cvt.u8.u32 %b," in text


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("[%r1]", "st.param.b32 [%b12x_in0], %r1;"),
        ("[%r1+-32]", "add.s32 %b12x_0, %r1, -32;"),
        ("[%rd1 + 16]", "cvt.u32.u64 %b12x_0, %rd1; add.s32 %b12x_1, %b12x_0, 16;"),
        ("[buffer+64]", "mov.u32 %b12x_0, buffer; add.s32 %b12x_1, %b12x_0, 64;"),
    ],
)
def test_shared_addresses(address: str, expected: str) -> None:
    statement = f"ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64 {{%r2, %r3}}, {address};"
    assert expected in replaced(statement).text


def test_a_generic_address_is_converted() -> None:
    text = replaced("ldmatrix.sync.aligned.m16n16.x1.trans.b8 {%r2, %r3}, [%rd1];").text
    assert "cvta.to.shared.u64 %b12x_0, %rd1; cvt.u32.u64 %b12x_1, %b12x_0;" in text


@pytest.mark.parametrize(
    ("statement", "expression"),
    [
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m1.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1,%r2,%r3}, "
         "{%r4,%r5}, {%f0,%f1,%f2,%f3};", "b12x::f8f6f4<b12x::E3M2, b12x::E2M1>"),
        ("ldmatrix.sync.aligned.m8n16.x4.shared::cta.b8x16.b6x16_p32 {%r0,%r1,%r2,%r3}, [%r4];",
         "b12x::ldmatrix_m8n16<4, 6>"),
        ("stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r4], {%r0, %r1};", "b12x::stmatrix_m16n8"),
        ("cvt.rn.satfinite.relu.e3m2x2.f32 %h, %f0, %f1;", "b12x::encode_f32<b12x::E3M2, true>"),
        ("cvt.rn.relu.f16x2.e2m3x2 %r0, %h;", "b12x::decode_f16x2<b12x::E2M3, true>"),
        ("cvt.rp.satfinite.ue8m0x2.bf16x2 %h, %r0;", "b12x::encode_ue8m0_bf16x2<true, true>"),
        ("cvt.rz.ue8m0x2.f32 %h, %f0, %f1;", "b12x::encode_ue8m0_f32<false, false>"),
        ("cvt.rn.bf16x2.ue8m0x2 %r0, %h;", "b12x::decode_ue8m0"),
        ("cvt.rn.satfinite.e4m3x2.bf16x2 %h, %r0;", "b12x::encode_bf16x2<b12x::E4M3, false>"),
        ("cvt.rn.scaled::n2::ue8m0.bf16x2.e2m1x2 %r0, %b, %h;", "b12x::decode_scaled_bf16x2<b12x::E2M1, false, false>"),
    ],
)  # fmt: skip
def test_which_stand_in(statement: str, expression: str) -> None:
    stand_in = replaced(statement).stand_in
    assert stand_in is not None
    assert stand_in.expression == expression


def test_pairs_without_a_rounding_are_rounded_to_nearest() -> None:
    text = replaced("fma.ftz.f32x2 %rd0, %rd1, %rd2, %rd3;").text
    assert text.count("fma.rn.ftz.f32 ") == 2
    assert "add.rz.f32 " in replaced("add.rz.f32x2 %rd0, %rd1, %rd2;").text


def test_a_load_of_256_bits_keeps_its_address() -> None:
    statement = "ld.global.L1::no_allocate.L2::evict_last.v4.b64 {%rd1, %rd2, %rd3, %rd4}, [%rd1+32];"
    text = replaced(statement).text
    assert "mov.b64 %b12x_0, %rd1; ld.global.L1::no_allocate.v2.b64 {%rd1, %rd2}, [%b12x_0+32];" in text
    assert "ld.global.L1::no_allocate.v2.b64 {%rd3, %rd4}, [%b12x_0+48];" in text


@pytest.mark.parametrize(
    "statement",
    [
        "mma.sync.aligned.m16n8k16.row.col.f16.e4m3.e4m3.f16 {%r4,%r5}, {%r0,%r1}, {%r2}, {%r4,%r5};",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0,%r1,%r2,%r3}, [%r4];",
        "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r4], {%r0, %r1};",
        "cvt.rn.satfinite.e4m3x2.f32 %h, %f0, %f1;",
        "cvt.rn.f16x2.e4m3x2 %r0, %h;",
        "cvt.rn.bf16x2.f32 %r0, %f0, %f1;",
        "max.f32 %f0, %f1, %f2;",
        "fma.rn.f32 %f0, %f1, %f2, %f3;",
        "fma.rn.bf16x2 %r0, %r1, %r2, %r3;",
        "add.f16 %h, %h, %h;",
        "ld.global.v4.b32 {%r0,%r1,%r2,%r3}, [%rd1];",
        "st.global.v2.b64 [%rd1], {%rd2, %rd3};",
        "ld.param.b64 %rd1, [o];",
    ],
)
def test_what_hopper_has_stays(statement: str) -> None:
    assert replacement(first(statement)) is None
