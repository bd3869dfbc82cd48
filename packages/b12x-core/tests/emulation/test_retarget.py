"""Whole modules: assembled for Hopper, and refused with names and lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from b12x_conformance.emulation import ToolError, ToolMissingError, UnknownInstructionError, assemble, retarget
from b12x_conformance.emulation.instructions import cases
from ptx_modules import module, needs_ptxas, needs_toolkit, probe_module

NARROW = "cvt.rn.satfinite.e2m1x2.f32 %b,\n %f0, %f1;"


@needs_toolkit
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_stand_in_assembles(case) -> None:
    snippets = [snippet for snippet, _ in case.probe.snippets]
    made = retarget(probe_module("\n".join(snippets), case.probe.data().shape[-1], case.probe.n_out))
    assert len(made.replaced) >= len(snippets)
    assert assemble(made)[:4] == b"\x7fELF"


@needs_toolkit
def test_lines_keep_their_numbers() -> None:
    ptx = module(f"mov.u32 %r0, 1;\n{NARROW}\nmov.u32 %r1, 2;")
    made = retarget(ptx)
    assert made.ptx.splitlines().index("mov.u32 %r1, 2;") == ptx.splitlines().index("mov.u32 %r1, 2;")
    assert made.replaced == ("cvt.rn.satfinite.e2m1x2.f32",)
    assert ".target sm_90a" in made.ptx
    assert "sm_120a" not in made.ptx


@needs_ptxas
def test_everything_else_stays_as_it_was() -> None:
    ptx = module("mov.u32 %r0, 1; add.f32x2 %rd0, %rd1, %rd2;\nmov.u32 %r1, 2;")
    made = retarget(ptx)
    before, after = (re.sub(r"add\.f32x2[^;]*;|\{ \.reg.*?\}(?=\n)", "", text) for text in (ptx, made.ptx))
    assert after == before.replace("sm_120a", "sm_90a")
    assert assemble(made)


@needs_ptxas
def test_a_version_that_ptxas_does_not_know_yet() -> None:
    assert assemble(retarget(module("mov.u32 %r0, 1;").replace("8.8", "97.1")))


def test_known_newer_instructions_are_all_named_at_once() -> None:
    body = "mov.u32 %r0, 1;\nst.bulk.weak.shared::cta [%rd0], 1024, 0;\ntcgen05.wait::ld.sync.aligned;"
    with pytest.raises(
        UnknownInstructionError, match=r"st\.bulk\.weak\.shared::cta \(line 9\), tcgen05\..* \(line 10\)"
    ):
        retarget(module(body))


def test_block_scaled_instructions_without_a_stand_in_are_named() -> None:
    sparse = "mma.sp::ordered_metadata.sync.aligned.m16n8k128.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
    with pytest.raises(UnknownInstructionError, match=r"mma\.sp::ordered_metadata.*line 8"):
        retarget(module(f"{sparse} {{%f0}}, {{%r0}}, {{%r1}}, {{%f0}}, %r0, 0, %r1, {{0,0}}, %r2, {{0,0}};"))


@needs_ptxas
@pytest.mark.parametrize(
    "statement",
    [
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd0], [%r0], %r1, %rs0;",
        "newer.instruction.b32 %r0, %r1;",
    ],
)
def test_what_ptxas_refuses_is_named_with_its_line(statement: str) -> None:
    ptx = module(f"mov.u32 %r0, 1;\n{statement}")
    with pytest.raises(UnknownInstructionError, match=rf"{re.escape(statement.split()[0])} .*line 9"):
        assemble(retarget(ptx), ptx)


@needs_ptxas
def test_other_complaints_are_passed_on() -> None:
    ptx = module("mov.u32 %r0, undeclared;")
    with pytest.raises(ToolError, match="undeclared"):
        assemble(retarget(ptx), ptx)


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    with pytest.raises(ToolMissingError, match=r"^nvcc \(CUDA toolkit 13\) is neither in PATH"):
        retarget(module("cvt.rn.f16x2.e2m3x2 %r0, %h;"), arch="sm_90")
