"""Arithmetic in pairs of fp32, in mixed types, and with three operands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from b12x_conformance.emulation import definitions as d
from b12x_conformance.emulation.definitions import Words
from b12x_conformance.emulation.probe import Check, Probe, equal


def _pair_data(rng: np.random.Generator) -> Words:
    """Three pairs of fp32 a lane: all bit patterns, near ones, subnormal ones."""
    words = rng.integers(0, 2**32, (24, 32, 6), dtype=np.uint32)
    words[:8] = (
        (rng.standard_normal((8, 32, 6)) * np.exp2(rng.integers(-12, 13, (8, 32, 6))))
        .astype(np.float32)
        .view(np.uint32)
    )
    words[8:12] &= np.uint32(0x80FFFFFF)
    words[12:14] = rng.choice(
        np.array([0, 0x80000000, 1, 0x3F800000, 0xBF800000, 0x7F800000, 0x007FFFFF], np.uint32), (2, 32, 6)
    )
    return words


def _same_floats(found: np.ndarray, expected: np.ndarray) -> str:
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(d.f32(found)), nan)
    return equal(np.where(nan, 0, found), np.where(nan, 0, expected.astype(np.float32).view(np.uint32)))


def probes() -> Iterator[Probe]:
    """All of them."""
    snippets: list[tuple[str, Check]] = []
    pairs = (
        ".reg .b64 a, b, c, y; mov.b64 a, { {$r0}, {$r1} }; mov.b64 b, { {$r2}, {$r3} }; mov.b64 c, { {$r4}, {$r5} };"
    )
    back = "mov.b64 { {$w0}, {$w1} }, y;"

    def pairwise(data: Words, results: Words, name: str, mode: str, ftz: bool) -> str:
        def one(x: float, y: float, z: float) -> float:
            if name == "mul":  # a zero of the product's own sign adds nothing
                return d.fused(x, y, math.copysign(0.0, math.copysign(1, x) * math.copysign(1, y)), mode, ftz)
            if name == "fma":
                return d.fused(x, y, z, mode, ftz)
            return d.fused(x, 1.0, -y if name == "sub" else y, mode, ftz)

        with np.errstate(invalid="ignore"):
            expected = np.vectorize(one)(*(d.f32(data[..., i : i + 2]) for i in (0, 2, 4)))
        return _same_floats(results, expected)

    for name, mode, ftz in (
        *((n, "rn", False) for n in ("add", "sub", "mul", "fma")),
        *((n, "rn", True) for n in ("add", "mul", "fma")),
        ("add", "rz", False), ("mul", "rm", False), ("fma", "rp", False), ("add", "", False), ("sub", "", True),
    ):  # fmt: skip
        opcode = ".".join(filter(None, (name, mode, "ftz" if ftz else "", "f32x2")))
        sources = "a, b, c" if name == "fma" else "a, b"
        text = f"{{ {pairs} {opcode} y, {sources}; {back} }}"
        snippets.append((text, lambda x, y, n=name, m=mode or "rn", f=ftz: pairwise(x, y, n, m, f)))
    yield Probe("f32x2", tuple(snippets), _pair_data, 2)

    def largest(data: Words, results: Words, pick: Callable[..., Any], absolute: bool, nan: bool) -> str:
        values = [d.f32(data[..., i : i + 2]) for i in (0, 2, 4)]
        values = [np.abs(v) for v in values] if absolute else values
        out = values[0]
        for v in values[1:]:
            out = pick(out, v)
        bad = np.isnan(values).any(0) if nan else np.isnan(values).all(0)
        out = np.where(bad, np.nan, out)
        found = d.f32(results)
        assert np.array_equal(np.isnan(found), np.isnan(out))
        assert np.array_equal(np.nan_to_num(found, nan=1.0), np.nan_to_num(out, nan=1.0))
        return "all values equal"

    three: list[tuple[str, Check]] = []
    for name, tail, pick in (
        ("max", "", np.fmax),
        ("min", "", np.fmin),
        ("max", ".NaN", np.maximum),
        ("max", ".abs", np.fmax),
    ):
        opcode = f"{name}{tail}.f32"
        text = "{ " + " ".join(f"{opcode} {{$w{i}}}, {{$r{i}}}, {{$r{i + 2}}}, {{$r{i + 4}}};" for i in range(2)) + " }"
        three.append((text, lambda x, y, p=pick, a=".abs" in tail, n="NaN" in tail: largest(x, y, p, a, n)))

    def mixed(data: Words, results: Words, name: str, kind: str) -> str:
        wide = d.FORMATS[kind].values()
        a, b = (wide[data[..., i].astype(np.int64) & 0xFFFF] for i in (0, 1))
        c = d.f32(data[..., 2])
        one = {
            "add": lambda x, y, z: d.fused(x, 1.0, z, "rn", False),
            "sub": lambda x, y, z: d.fused(x, 1.0, -z, "rn", False),
        }
        fma = lambda x, y, z: d.fused(x, y, z, "rn", False)  # noqa: E731
        with np.errstate(invalid="ignore"):
            expected = np.vectorize(one.get(name, fma))(a, b, c)
        return _same_floats(results[..., 0], expected)

    for name, kind in itertools.product(("add", "sub", "fma"), ("f16", "bf16")):
        sources = "a, b, {$r2}" if name == "fma" else "a, {$r2}"
        widths = "cvt.u16.u32 a, {$r0}; cvt.u16.u32 b, {$r1};"
        text = f"{widths} {name}.rn.f32.{kind} {{$w0}}, {sources}; mov.b32 {{$w1}}, 0;"
        three.append((f"{{ .reg .b16 a, b; {text} }}", lambda x, y, n=name, k=kind: mixed(x, y, n, k)))
    yield Probe("arithmetic-of-sm_100", tuple(three), _pair_data, 2)
