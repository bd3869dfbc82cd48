"""PTX modules to try things on, and what they need."""

from __future__ import annotations

import re

import pytest
from b12x_conformance.emulation import ToolMissingError, tools


def missing(*names: str) -> str:
    """Why programs cannot be run; empty if they can."""
    for name in names:
        try:
            tools.find(name)
        except ToolMissingError as error:
            return str(error)
    return ""


needs_ptxas = pytest.mark.skipif(bool(missing("ptxas")), reason=missing("ptxas") or "-")
needs_toolkit = pytest.mark.skipif(bool(missing("nvcc", "ptxas")), reason=missing("nvcc", "ptxas") or "-")


def module(body: str, arch: str = "sm_120a") -> str:
    """A module of one kernel with registers of every kind; `body` starts on line 8."""
    return (
        f".version 8.8\n.target {arch}\n.address_size 64\n.visible .entry k(.param .u64 o)\n.reqntid 32, 1, 1\n{{\n"
        ".reg .b32 %r<24>; .reg .f32 %f<16>; .reg .b64 %rd<8>; .reg .b16 %rs<4>, %h; .reg .b8 %b; .reg .pred %p<2>;\n"
        f"{body}\nret;\n}}\n"
    )


def probe_module(snippet: str, n_in: int, n_out: int) -> str:
    """A module that runs one snippet of a probe on what it loads, and stores what that gives."""
    loads = " ".join(f"ld.global.b32 %r{i}, [%rd1+{4 * i}];" for i in range(n_in))
    stores = " ".join(f"st.global.b32 [%rd2+{4 * i}], %o{i};" for i in range(n_out))
    sources = [f"%r{i}" for i in range(n_in)] + ["%rd1", "%rd2"]
    text = re.sub(r"\{\$r(\d+)\}", lambda m: sources[int(m[1])], snippet)
    text = re.sub(r"\{\$w(\d+)\}", r"%o\1", text)
    outputs = f".reg .b32 %o<{n_out}>;"
    start = "ld.param.u64 %rd1, [o]; cvta.to.global.u64 %rd1, %rd1; add.u64 %rd2, %rd1, 4096;"
    return module(f"{outputs} {start} {loads}\n{text}\n{stores}")
