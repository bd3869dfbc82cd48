"""Matrix instructions in 8-bit and 4-bit operands, with and without block scales."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from b12x_conformance.emulation import definitions as d
from b12x_conformance.emulation.definitions import Words
from b12x_conformance.emulation.probe import Check, Probe

_ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
SUM_BOUND = 2.0**-20
"""Error of a sum of 32 or 64 exact products, over the sum of their magnitudes: the fp32 sums of the hardware drop what
is below 2 ** -23 of the largest addend, up to 16 times in each of four steps."""


def _mma_ptx(opcode: str, selectors: tuple[int, int, int, int] | None, form: int) -> str:
    """PTX of an mma on inputs a0..a3, b0, b1, c0..c3, sfa, sfb. `form`: how its operands are written."""
    d_list, c_list = "{ {$w0}, {$w1}, {$w2}, {$w3} }", "{ {$r6}, {$r7}, {$r8}, {$r9} }"
    a_list, b_list = "{ {$r0}, {$r1}, {$r2}, {$r3} }", "{ {$r4}, {$r5} }"
    before = after = guard = ""
    if form:  # accumulators in fp32 registers of a scope of their own, under a predicate that holds
        before = ".reg .f32 d0, d1, d2, d3, c<4>; .reg .pred go; setp.ne.u32 go, {$r4}, 0x12345678; "
        before += " ".join(f"mov.b32 c{i}, {{$r{6 + i}}}; mov.b32 d{i}, 0;" for i in range(4))
        after = " ".join(f"mov.b32 {{$w{i}}}, d{i};" for i in range(4))
        d_list, c_list, guard = "{d0,d1,d2,d3}", "{c0,c1,c2,c3}", "@go "
    text = f"{guard}{opcode} {d_list}, {a_list}, {b_list}, {c_list}"
    if selectors is not None:
        chosen = [str(s) for s in selectors]
        if form:
            before += " .reg .b16 s<4>; " + " ".join(f"mov.b16 s{i}, {s};" for i, s in enumerate(chosen))
            chosen = [f"s{i}" for i in range(4)]
        text += f", {{$r10}}, {{{chosen[0]}, {chosen[1]}}}, {{$r11}}, {{{chosen[2]}, {chosen[3]}}}"
    return f"{{ {before} {text}; {after} }}"


@dataclass(frozen=True)
class _Mma:
    """Checks one mma: types of A and B, K, number and type of the scales along K, selectors."""

    a: str
    b: str
    k: int
    blocks: int = 0
    scale: str = ""
    selectors: tuple[int, int, int, int] = (0, 0, 0, 0)

    def __call__(self, data: Words, results: Words) -> str:
        a = d.matrix_a(d.elements(data[..., 0:4], self.a, self.k), self.k)
        b = d.matrix_b(d.elements(data[..., 4:6], self.b, self.k), self.k)
        c = d.matrix_c(d.f32(data[..., 6:10]))
        av, bv = d.FORMATS[self.a].values()[a], d.FORMATS[self.b].values()[b]
        sa = sb = None
        if self.blocks:
            codes = d.scale_matrices(data[..., 10], data[..., 11], self.blocks, self.selectors)
            sa, sb = (d.scale_values(code, self.scale) for code in codes)
        with np.errstate(invalid="ignore", over="ignore"):
            expected, magnitude = d.multiply(av, bv, c, sa, sb)
        return _near(d.matrix_c(d.f32(results)), expected, magnitude)


def _near(found: d.Values, expected: d.Values, magnitude: d.Values) -> str:
    """Compare fp32 sums: NaN where expected, infinite where beyond fp32, else within SUM_BOUND of the magnitudes."""
    largest = float(np.finfo(np.float32).max)
    sure = magnitude <= largest  # beyond it, a partial sum may be infinite, and what comes of it is open
    assert np.array_equal(np.isnan(found[sure]), np.isnan(expected[sure]))
    assert np.isnan(found[np.isnan(expected)]).all(), f"{np.isnan(expected).sum()} NaN expected"
    checked = sure & ~np.isnan(expected)
    tiny = 2.0**-149 * 8  # results below the normal numbers of fp32 are rounded to multiples of 2 ** -149
    error = np.abs(found[checked] - expected[checked]) / (magnitude[checked] + tiny / SUM_BOUND)
    worst = float(error.max(initial=0))
    assert worst <= SUM_BOUND, f"off by {worst:.3g} of the terms' magnitude, {(error > SUM_BOUND).sum()} elements"
    return f"worst error {worst:.3g} of the terms' magnitude"


def _exact(check: Check) -> Check:
    """A check for data whose sums fp32 holds exactly: no error at all."""

    def checked(data: Words, results: Words) -> str:
        said = check(data, results)
        assert "worst error 0 " in said, f"sums that fp32 holds are off: {said}"
        return said

    return checked


def _mma_data(scale: str, finite: tuple[str, ...] = (), exact: bool = False) -> Callable[[np.random.Generator], Words]:
    """Operands at random: every code, NaN and infinity too in few places; scales near 1, far apart, or NaN."""

    def make(rng: np.random.Generator) -> Words:
        trials = 96
        words = rng.integers(0, 2**32, (trials, 32, 12), dtype=np.uint32)
        words[..., 6:10] = (rng.standard_normal((trials, 32, 4)) * 10).astype(np.float32).view(np.uint32)
        quiet = slice(0, 64)
        if finite:  # most trials without NaN and infinity: an exponent of 0xxx has neither, in any 8-bit code
            words[quiet, :, 0:6] &= np.uint32(0xBFBFBFBF)
            words[64:80, :, 0:6] = np.where(rng.random((16, 32, 6)) < 0.02, words[64:80, :, 0:6], 0)
        words[5, :, 0:6] = 0
        words[6, :, 0:6] = 0x80808080  # negative zeros of 8-bit and 4-bit codes
        words[7, :, 0:6] = rng.choice([0, 1 << 7, 3 << 14, 2 << 21, 1 << 28], (32, 6)).astype(np.uint32)
        words[8, :, 6:10] = 0
        words[9, :, 6:10] = 0x80000000
        if exact:
            words[..., 6:10] = rng.integers(-64, 64, (trials, 32, 4)).astype(np.float32).view(np.uint32)
        if scale == "ue8m0":
            near = rng.integers(120, 135, (trials, 32, 2, 4))
            if exact:
                near = np.full_like(near, 127)
            else:
                far = rng.integers(0, 255, (20, 1, 1, 1))
                near[20:40] = np.concatenate((far, 254 - far), axis=2) + 0 * near[20:40]
                near[40:50, :, 0], near[40:50, :, 1] = 0, rng.integers(100, 255, (10, 32, 4))
                near[50:56] = rng.integers(60, 255, (6, 32, 2, 4))
                near[56:60] = np.where(rng.random((4, 32, 2, 4)) < 0.2, 255, near[56:60])
            words[..., 10:12] = np.ascontiguousarray(near.astype(np.uint8)).view(np.uint32)[..., 0]
        if scale == "ue4m3":
            near = rng.integers(0, 0x7F, (trials, 32, 2, 4))
            if exact:
                near = np.full_like(near, 0x38)
            else:
                near[20:24] = rng.integers(0, 9, (4, 32, 2, 4))  # zero, subnormal, the smallest normal scale
                near[24:28] = 0x7E
                near[28:32] = np.where(rng.random((4, 32, 2, 4)) < 0.2, 0x7F, near[28:32])
            words[..., 10:12] = np.ascontiguousarray(near.astype(np.uint8)).view(np.uint32)[..., 0]
        return words

    return make


def probes() -> Iterator[Probe]:
    """All of them."""
    pairs = list(itertools.product(_ELEMENTS, _ELEMENTS))
    for kind, scale in (("f8f6f4", ""), ("mxf8f6f4", "ue8m0")):
        snippets = []
        for i, (a, b) in enumerate(pairs):
            tail = ".block_scale.scale_vec::1X" if scale else ""
            opcode = f"mma.sync.aligned.m16n8k32.row.col.kind::{kind}{tail}.f32.{a}.{b}.f32" + (
                ".ue8m0" if scale else ""
            )
            form = _mma_ptx(opcode, (0, 0, 0, 0) if scale else None, i % 2)
            snippets.append((form, _Mma(a, b, 32, 1 if scale else 0, scale)))
        yield Probe(f"mma-{kind}", tuple(snippets), _mma_data(scale, ("8-bit",)), 4)
    snippets = []
    for i, selectors in enumerate(itertools.product(range(4), range(2), range(4), range(4))):
        opcode = "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e2m1.f32.ue8m0"
        snippets.append((_mma_ptx(opcode, selectors, i % 2), _Mma("e4m3", "e2m1", 32, 1, "ue8m0", selectors)))
    yield Probe("mma-mxf8f6f4-selectors", tuple(snippets), _mma_data("ue8m0", ("8-bit",)), 4)
    for kind, blocks, scale in (
        ("mxf4", 2, "ue8m0"),
        ("mxf4nvf4", 2, "ue8m0"),
        ("mxf4nvf4", 4, "ue8m0"),
        ("mxf4nvf4", 4, "ue4m3"),
    ):
        opcode = (
            f"mma.sync.aligned.kind::{kind}.block_scale.scale_vec::{blocks}X.m16n8k64.row.col.f32.e2m1.e2m1.f32.{scale}"
        )
        bytes_of = (0, 2) if blocks == 2 else (0,)
        chosen = list(itertools.product(bytes_of, range(2), bytes_of, range(4)))
        made = [(_mma_ptx(opcode, s, i % 2), _Mma("e2m1", "e2m1", 64, blocks, scale, s)) for i, s in enumerate(chosen)]
        name = f"mma-{kind}-{blocks}x-{scale}"
        yield Probe(name, tuple(made), _mma_data(scale), 4)
        yield Probe(f"{name}-exact", tuple((s, _exact(c)) for s, c in made), _mma_data(scale, exact=True), 4)
    yield Probe("mma-f8f6f4-fp16", tuple(_fp16_mma()), _mma_data("", ("8-bit",)), 2)


def _fp16_mma() -> Iterator[tuple[str, Check]]:
    for a, b in (("e4m3", "e2m1"), ("e2m1", "e2m1"), ("e3m2", "e2m3")):

        def check(data: Words, results: Words, a: str = a, b: str = b) -> str:
            half = d.FORMATS["f16"].values()
            av = d.FORMATS[a].values()[d.matrix_a(d.elements(data[..., 0:4], a, 32), 32)]
            bv = d.FORMATS[b].values()[d.matrix_b(d.elements(data[..., 4:6], b, 32), 32)]
            c = d.matrix_c(half[d.unpack(data[..., 6:8], 2)])
            found = d.matrix_c(half[d.unpack(results, 2)])
            with np.errstate(invalid="ignore"):
                expected, magnitude = d.multiply(av, bv, c, None, None)
            known = np.isfinite(expected) & (magnitude < 65000)
            assert np.isnan(found[np.isnan(expected)]).all()
            error = np.abs(found[known] - expected[known]) / (magnitude[known] + 2.0**-14)
            assert error.max() <= 2.0**-11 + SUM_BOUND, f"off by {error.max():.3g}"
            return f"worst error {error.max():.3g} of the terms' magnitude"

        yield (
            f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.{a}.{b}.f16 {{ {{$w0}}, {{$w1}} }}, "
            "{ {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7} };",
            check,
        )
