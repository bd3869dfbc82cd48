"""Conversions to and from 4-bit and 6-bit elements and powers of two."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from b12x_conformance.emulation import definitions as d
from b12x_conformance.emulation.definitions import Words
from b12x_conformance.emulation.probe import Check, Probe, equal

_EDGES = np.array(
    [0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-24, 0.25, 0.75, 1.25, 5.0, 6.0, 7.0, 28.0, 30.0, 448.0, 464.0]
)


def _float_data(rng: np.random.Generator) -> Words:
    """Two fp32 a lane: all sizes, every value of a 4-bit and 6-bit format, halfway between them, and edges."""
    words = rng.integers(0, 2**32, (64, 32, 2), dtype=np.uint32)
    words[:24] = (
        (rng.standard_normal((24, 32, 2)) * np.exp2(rng.integers(-6, 7, (24, 32, 2))))
        .astype(np.float32)
        .view(np.uint32)
    )
    steps = np.sort(np.concatenate([d.FORMATS[f].values() for f in ("e2m1", "e3m2", "e2m3")]))
    halfway = np.concatenate(
        [steps, (steps[1:] + steps[:-1]) / 2, steps * (1 + 2.0**-20), -_EDGES, _EDGES, [math.inf, -math.inf, math.nan]]
    )
    near_powers = np.exp2(np.arange(-127, 128.0))[:, None] * np.array([1, 1 + 2.0**-23, 1.5, 2 - 2.0**-22])
    chosen = np.concatenate([halfway, near_powers.ravel()]).astype(np.float32).view(np.uint32)
    words[24:56] = rng.permutation(np.resize(chosen, 32 * 64)).reshape(32, 32, 2)
    return words


def _pack(high: np.ndarray, low: np.ndarray, shift: int) -> np.ndarray:
    return (high << shift | low).astype(np.uint32)[..., None]


def _relu(x: np.ndarray, on: bool) -> np.ndarray:
    return np.where(np.isnan(x) | (x > 0), x, 0.0) if on else x


def _bits_of(x: np.ndarray, name: str) -> np.ndarray:
    """Codes of numbers that a 16-bit format holds; NaN as all ones but the sign."""
    if name == "f16":
        codes = x.astype(np.float16).view(np.uint16).astype(np.int64)
    else:
        codes = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.int64)
    return np.where(np.isnan(x), 0x7FFF, codes)


def probes() -> Iterator[Probe]:
    """All of them."""
    to_narrow: list[tuple[str, Check]] = []
    to_wide: list[tuple[str, Check]] = []
    for name in ("e2m1", "e3m2", "e2m3"):
        shift = 4 if name == "e2m1" else 8
        register, out = (".b8", "cvt.u32.u8") if name == "e2m1" else (".b16", "cvt.u32.u16")
        narrow = d.FORMATS[name]
        for relu in (False, True):
            tail = ".relu" if relu else ""

            def to_pair(data: Words, results: Words, f: d.Format = narrow, s: int = shift, relu: bool = relu) -> str:
                high, low = (f.nearest(_relu(d.f32(data[..., i]), relu)) for i in range(2))
                return equal(results, _pack(high, low, s))

            text = f"cvt.rn.satfinite{tail}.{name}x2.f32 v, {{$r0}}, {{$r1}};"
            to_narrow.append((f"{{ .reg {register} v; {text} {out} {{$w0}}, v; }}", to_pair))

            def from_pair(data: Words, results: Words, f: d.Format = narrow, s: int = shift, relu: bool = relu) -> str:
                codes = [(data[..., 0].astype(np.int64) >> at) & ((1 << f.bits) - 1) for at in (s, 0)]
                high, low = (_bits_of(_relu(f.values()[code], relu), "f16") for code in codes)
                return equal(results, _pack(high, low, 16))

            into = "cvt.u8.u32" if name == "e2m1" else "cvt.u16.u32"
            mask = 0xFF if name == "e2m1" else 0x3F3F
            text = f"and.b32 t, {{$r0}}, {mask}; {into} v, t; cvt.rn{tail}.f16x2.{name}x2 {{$w0}}, v;"
            to_wide.append((f"{{ .reg {register} v; .reg .b32 t; {text} }}", from_pair))
    # lanes that do not take part keep what they had
    for rounding, saturate in itertools.product(("rz", "rp"), (False, True)):
        tail = ".satfinite" if saturate else ""

        def to_powers(data: Words, results: Words, up: bool = rounding == "rp", s: bool = saturate) -> str:
            high, low = (d.to_ue8m0(d.f32(data[..., i]), up, s) for i in range(2))
            return equal(results, np.where(data[..., :1] & 1, 77, _pack(high, low, 8)).astype(np.uint32))

        def to_powers_16(data: Words, results: Words, up: bool = rounding == "rp", s: bool = saturate) -> str:
            high, low = (d.to_ue8m0(d.f32(x), up, s) for x in (data[..., 0] & 0xFFFF0000, data[..., 0] << 16))
            return equal(results, _pack(high, low, 8))

        guarded = "setp.eq.u32 p, t, 1; mov.b16 v, 77; @!p " if saturate else "setp.ne.u32 p, t, 1; mov.b16 v, 77; @p "
        text = f".reg .pred p; .reg .b32 t; and.b32 t, {{$r0}}, 1; {guarded}"
        text += f"cvt.{rounding}{tail}.ue8m0x2.f32 v, {{$r0}}, {{$r1}};"
        to_narrow.append((f"{{ .reg .b16 v; {text} cvt.u32.u16 {{$w0}}, v; }}", to_powers))
        text = f"cvt.{rounding}{tail}.ue8m0x2.bf16x2 v, {{$r0}}; cvt.u32.u16 {{$w0}}, v;"
        to_narrow.append((f"{{ .reg .b16 v; {text} }}", to_powers_16))

    def from_powers(data: Words, results: Words) -> str:
        codes = [(data[..., 0].astype(np.int64) >> at) & 0xFF for at in (8, 0)]
        high, low = (_bits_of(d.scale_values(code, "ue8m0"), "bf16") for code in codes)
        return equal(results, _pack(high, low, 16))

    to_wide.append(("{ .reg .b16 v; cvt.u16.u32 v, {$r0}; cvt.rn.bf16x2.ue8m0x2 {$w0}, v; }", from_powers))
    yield Probe("cvt-to-narrow", tuple(to_narrow), _float_data, 1)
    yield Probe("cvt-from-narrow", tuple(to_wide), _float_data, 1)
    yield from _sixteen_bit_probes()


def _sixteen_bit_probes() -> Iterator[Probe]:
    """Conversions between pairs of 16-bit numbers and narrow elements that came with PTX ISA 9.1 and later."""
    to_narrow: list[tuple[str, Check]] = []
    to_bf16: list[tuple[str, Check]] = []
    for name, kind in itertools.product(("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"), ("f16", "bf16")):
        narrow = d.FORMATS[name]
        shift, register, bits = (4, ".b8", "u8") if name == "e2m1" else (8, ".b16", "u16")
        for relu in (False, True):
            tail = ".relu" if relu else ""

            def to_pair(
                data: Words, results: Words, f: d.Format = narrow, s: int = shift, relu: bool = relu, kind: str = kind
            ) -> str:
                wide = d.FORMATS[kind].values()
                values = [wide[(data[..., 0] >> np.uint32(at)).astype(np.int64) & 0xFFFF] for at in (16, 0)]
                values = [_relu(v, relu) for v in values]
                # e4m3 and e5m2 have a NaN, which is any of their NaN codes; infinity saturates
                codes = [np.where(np.isnan(v), (1 << (f.bits - 1)) - 1, f.nearest(v)) for v in values]
                return equal(results, _pack(codes[0], codes[1], s))

            text = f"cvt.rn.satfinite{tail}.{name}x2.{kind}x2 v, {{$r0}}; cvt.u32.{bits} {{$w0}}, v;"
            if (name, kind) not in (("e4m3", "f16"), ("e5m2", "f16")):  # Hopper has those
                to_narrow.append((f"{{ .reg {register} v; {text} }}", to_pair))
            if kind == "f16":
                continue
            for satfinite, scaled in itertools.product((False, True), (False, True)):

                def from_pair(
                    data: Words,
                    results: Words,
                    f: d.Format = narrow,
                    s: int = shift,
                    relu: bool = relu,
                    satfinite: bool = satfinite,
                    scaled: bool = scaled,
                ) -> str:
                    out = []
                    for at, scale in ((s, 8), (0, 0)):
                        codes = (data[..., 0].astype(np.int64) >> at) & ((1 << f.bits) - 1)
                        x = f.values()[codes]
                        if scaled:
                            x = x * d.scale_values((data[..., 1] >> np.uint32(scale)).astype(np.int64) & 0xFF, "ue8m0")
                        out.append(_to_bf16(_relu(x, relu), satfinite))
                    return equal(_one_nan(results), _pack(out[0], out[1], 16))

                mask = 0x3F3F if narrow.bits == 6 else (1 << (2 * narrow.bits)) - 1
                end = (".satfinite" if satfinite else "") + tail + (".scaled::n2::ue8m0" if scaled else "")
                if satfinite and not scaled:
                    continue
                text = f"and.b32 t, {{$r0}}, {mask}; cvt.{bits}.u32 v, t; cvt.u16.u32 s, {{$r1}}; "
                text += f"cvt.rn{end}.bf16x2.{name}x2 {{$w0}}, v{', s' if scaled else ''};"
                to_bf16.append((f"{{ .reg {register} v; .reg .b32 t; .reg .b16 s; {text} }}", from_pair))
    yield Probe("cvt-16-bit-to-narrow", tuple(to_narrow), _float_data, 1)
    yield Probe("cvt-narrow-to-bf16", tuple(to_bf16), _float_data, 1)


def _to_bf16(x: np.ndarray, satfinite: bool) -> np.ndarray:
    """Codes of values rounded to bf16, ties to even; NaN as 0x7fff."""
    largest = float(d.FORMATS["bf16"].values()[0x7F7F])
    codes = d.FORMATS["bf16"].nearest(x)
    beyond = np.abs(x) >= largest * (1 + 2.0**-9) if not satfinite else np.zeros_like(x, dtype=bool)
    codes = np.where(beyond, 0x7F80 | np.signbit(x).astype(np.int64) << 15, codes)
    return np.where(np.isnan(x), 0x7FFF, codes)


def _one_nan(words: Words) -> Words:
    """Pairs of bf16 with every NaN as 0x7fff."""
    halves = d.unpack(words, 2)
    halves = np.where((halves & 0x7FFF) > 0x7F80, 0x7FFF, halves)
    return _pack(halves[..., 1::2], halves[..., 0::2], 16)[..., 0]
