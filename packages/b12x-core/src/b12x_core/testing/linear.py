"""Tests of the linear kernels. Truth is float64 from the stored bytes; activations are quantized by the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from b12x_core import counters
from b12x_core.capabilities import Op, Tier, support_table
from b12x_core.formats import FP8_GROUP, FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, SCHEMES
from b12x_core.ops._linear_kernel import kernels_for
from b12x_core.ops.linear import LinearWeights, linear, prepare_linear
from b12x_core.reference.quantize import dequantize_activation, quantize
from b12x_core.runtime.devices import facts
from b12x_core.testing import weights
from b12x_core.testing.bounds import bound, error
from b12x_core.testing.cases import Case, WrongResultError, busy_stream, equal, poison, within

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SERVED = tuple(row.scheme for row in support_table() if row.op is Op.LINEAR and row.kernels[Tier.PORTABLE])
STATIC = ("fp8-tensor", "fp8-channel-tensor")
ONE_HOT = ((192, 128), (320, 128), (2624, 128), (64, 192), (2112, 64), (80, 576))
SCALED_ONE_HOT = ((17, 160), (160, 2880))
TOKENS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 64, 65, 128, 200, 256, 512, 777, 1024, 1536, 2048)


class Layer:
    """A stored weight with its scales, by default random ones, and the static scale and bias of its layer."""

    def __init__(
        self,
        name: str,
        n: int,
        k: int,
        device: torch.device,
        scale: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.scheme = SCHEMES[name]
        self.data, random_scale = weights.random_weight(self.scheme, n, k, device)
        self.scale = random_scale if scale is None else scale
        self.global_scale = weights.global_scale(self.scheme, n, k, device) if global_scale is None else global_scale
        self.input_scale = input_scale
        if input_scale is None and self.scheme.static_activation_scale:
            self.input_scale = torch.tensor([3.0 / (448 * 6)], device=device)
        self.bias = bias

    def prepare(self, into: LinearWeights | None = None) -> LinearWeights:
        """What `linear` takes."""
        return prepare_linear(
            self.scheme,
            self.data,
            self.scale,
            global_scale=self.global_scale,
            input_scale=self.input_scale,
            bias=self.bias,
            into=into,
        )

    def truth(self, x: torch.Tensor) -> torch.Tensor:
        """Float64, from what is stored and the activation as the scheme quantizes it."""
        y = self.seen(x) @ weights.exact_weight(self.scheme, self.data, self.scale, self.global_scale).t()
        return y if self.bias is None else y + self.bias.double()

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """The activation as the scheme quantizes it, in float64."""
        fmt = self.scheme.activation
        if not fmt.quantized:
            return x.double()
        q = quantize(x, fmt, self.input_scale)
        if q.global_scale is None:
            return dequantize_activation(q).double()
        return dequantize_activation(replace(q, global_scale=None)).double() * q.global_scale.double()


def case(
    name: str,
    tokens: Sequence[int],
    n: int,
    k: int,
    device: torch.device,
    label: str,
    run: Callable[[], float],
    x: torch.dtype | None = None,
    out: torch.dtype | None = None,
) -> Case:
    """A case of calls with some numbers of tokens, reported under the kernel of the first."""
    x = input_dtype(name) if x is None else x
    gpu = facts(device)
    specs = [
        spec for m in tokens for spec in kernels_for(SCHEMES[name], x, x if out is None else out, m, n, k, gpu) if m
    ]
    kernel = specs[0].name if specs else f"linear {name} without tokens"
    return Case(kernel, f"{name} {label} M={','.join(map(str, tokens))} N={n} K={k}", run, tuple(specs))


def in_tiles(name: str) -> bool:
    """Whether block scales lie in the tiles of a scheme's weight."""
    return SCHEMES[name].weight in (MXFP8, MXFP4, NVFP4)


def input_dtype(name: str) -> torch.dtype:
    """The usual dtype of an activation in a scheme."""
    return FP16 if name == "fp16" else BF16


def run_random(
    name: str, m: int, n: int, k: int, device: torch.device, x_dtype: torch.dtype, out: torch.dtype, with_bias: bool
) -> float:
    """Random data; x is a view into NaN, outputs land in memory full of NaN."""
    layer = Layer(name, n, k, device, bias=torch.randn(n, device=device, dtype=x_dtype) if with_bias else None)
    around = torch.full((m + 2, k + 24), float("nan"), device=device, dtype=x_dtype)
    x = around[1 : m + 1, 8 : 8 + k]
    x.copy_(torch.randn(m, k, device=device) * torch.exp(torch.randn(m, 1, device=device) * 2))
    static = None
    if m and (layer.scheme.static_activation_scale or (name in STATIC and m % 2)):
        largest = 448 * 6 if layer.scheme.activation == NVFP4 else 448
        static = layer.input_scale = (x.float().abs().amax() / largest).reshape(1)
    w = layer.prepare()
    expected = layer.truth(x)
    poison(device)
    y = linear(x, w, out_dtype=out)
    what = f"{name} M={m} N={n} K={k} x={x_dtype} out={out} bias={with_bias} static={static is not None}"
    return within(y, expected, bound("linear", out), what) if m else 0.0


def run_one_hot(name: str, n: int, k: int, device: torch.device) -> float:
    """One-hot rows read back the weight, exactly up to the rounding of the output."""
    scheme = SCHEMES[name]
    # few bits, so that products are exact; the scale of a block tells which one it is
    scale = weights.telling_scale(scheme, n, k, device)
    rows = torch.arange(n, device=device) // weights.SHARD
    shards = 2.0 ** (rows % 5 - 2) if scheme.weight.global_scale else None
    static: float | None = 1.0 if scheme.static_activation_scale is None and name in STATIC else None
    static = 2.0**-6 if scheme.static_activation_scale else static
    one = None if static is None else torch.tensor([static], device=device)
    layer = Layer(name, n, k, device, scale, shards, one)
    x = torch.eye(k, device=device, dtype=input_dtype(name))
    w = layer.prepare()
    expected = (layer.truth(x) + 0.0).to(FP32)  # a sum of zeros of both signs is 0.0
    for rows in (x, x[:7], x[-33:]):
        first = k - 33 if rows.shape[0] == 33 else 0
        y = linear(rows, w, out_dtype=FP32)
        wanted = expected[first : first + rows.shape[0]]
        what = f"{name} one-hot N={n} K={k} rows={rows.shape[0]}"
        if scheme.activation in (FP8_ROW, FP8_GROUP, FP8_TENSOR) and one is None:  # 1 / 448 is no short number
            within(y, wanted.double(), bound("linear", FP32), what)
        else:
            equal(y, wanted, what)
    return 0.0


def run_far_apart(name: str, x_dtype: torch.dtype, device: torch.device) -> float:
    """Scales of a row up to 2^60 apart: the weight is read back as `decoded_weight` rounds it, bit for bit."""
    scheme, (n, k) = SCHEMES[name], (160, 2880)
    layer = Layer(name, n, k, device, weights.telling_scale(scheme, n, k, device, spread=61))
    assert layer.scale is not None
    w = layer.prepare()
    expected = weights.decoded_weight(layer.data, layer.scale, scheme, x_dtype).t()
    x = torch.eye(k, device=device, dtype=x_dtype)
    for rows in (slice(0, 5), slice(100, 130), slice(0, k)):
        y = linear(x[rows], w, out_dtype=FP32)
        equal(y, (expected[rows] + 0.0).to(FP32), f"{name} x={x_dtype} scales far apart, rows {rows}")
    return 0.0


def run_rounding(name: str, m: int, device: torch.device) -> float:
    """The activation is quantized by the scheme's rule: the result is that, and not that of 16-bit activations."""
    scheme = SCHEMES[name]
    layer = Layer(name, 320, 1024, device)
    x = torch.randn(m, 1024, device=device, dtype=BF16)
    before = counters.snapshot().get(f"linear/{name}", {"calls": 0})["calls"]
    y = linear(x, layer.prepare())
    if counters.snapshot()[f"linear/{name}"]["calls"] != before + 1:
        raise WrongResultError(f"{name}: the call was not counted under the scheme")
    limit = bound("linear", BF16)
    unquantized = x.double() @ weights.exact_weight(scheme, layer.data, layer.scale, layer.global_scale).t()
    if error(y, unquantized.cpu()) <= 2 * limit.value:
        raise WrongResultError(f"{name} M={m}: the result is that of activations that were not quantized")
    return within(y, layer.truth(x), limit, f"{name} M={m} quantized activations")


def run_repeats(name: str, m: int, n: int, k: int, device: torch.device, count: int) -> float:
    """The same bits each time, beside a busy stream."""
    w = Layer(name, n, k, device).prepare()
    x = torch.randn(m, k, device=device, dtype=input_dtype(name))
    first = linear(x, w)
    differences = torch.zeros((), dtype=torch.int64, device=device)
    with busy_stream(device):
        for _ in range(count):
            differences += (linear(x, w).view(torch.int16) != first.view(torch.int16)).sum()
    if differences.item():
        raise WrongResultError(f"{name} M={m} N={n} K={k}: {differences.item()} values differ over {count} repeats")
    return 0.0


def run_zero_input(name: str, device: torch.device, static: float | None) -> float:
    """An activation of zeros, and static scales of 0 and close to it, give the bias: never NaN."""
    input_scale = None if static is None else torch.tensor([static], device=device)
    bias = torch.randn(96, device=device)
    w = Layer(name, 96, 160, device, input_scale=input_scale, bias=bias).prepare()
    for m in (1, 40):
        x = torch.zeros(m, 160, device=device, dtype=input_dtype(name))
        what = f"{name} x=0 static={static} M={m}"
        equal(linear(x, w, out_dtype=FP32), bias.expand(m, -1).contiguous(), what)
        if static is not None and not linear(torch.randn_like(x), w, out_dtype=FP32).isfinite().all():
            raise WrongResultError(f"{name} static={static} M={m}: some results are not finite")
    return 0.0


def run_no_number(name: str, device: torch.device) -> float:
    """A scale that is NaN makes its row of the output NaN, and no other."""
    layer = Layer(name, 130, 320, device)
    assert layer.scale is not None
    layer.scale.view(torch.uint8)[70, 3] = 127 if layer.scheme.weight == NVFP4 else 255
    w = layer.prepare()
    for m in (2, 48):
        nan = linear(torch.randn(m, 320, device=device, dtype=BF16), w).isnan()
        if not nan[:, 70].all() or nan.sum() != m:
            raise WrongResultError(f"{name} M={m}: {int(nan.sum())} values are NaN, not those of row 70")
    return 0.0


def run_reload(name: str, device: torch.device) -> float:
    """Preparing into earlier weights keeps addresses; a recorded graph then serves the new ones."""
    old, new = (Layer(name, 192, 320, device) for _ in range(2))
    if new.global_scale is not None:
        new.global_scale = new.global_scale.flip(0)
    x = torch.randn(5, 320, device=device, dtype=input_dtype(name))
    w = old.prepare()
    linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, w)
    if new.prepare(w) is not w:
        raise WrongResultError(f"{name}: preparing into weights returned others")
    graph.replay()
    equal(y, linear(x, new.prepare()), f"{name} reload")
    return 0.0


def cases(device: torch.device) -> Iterator[Case]:
    """All of them."""
    for name in SERVED:
        yield from random_cases(name, device)
        scaled = in_tiles(name)
        for n, k in ONE_HOT + (SCALED_ONE_HOT if scaled else ()):
            run = partial(run_one_hot, name, n, k, device)
            yield case(name, (k, 7, 33), n, k, device, "one-hot", run, out=FP32)
        for m, n, k in ((1, 2880, 2880), (16, 512, 8192), (100, 640, 4096), (512, 2048, 2048)):
            yield case(name, (m,), n, k, device, "repeats", partial(run_repeats, name, m, n, k, device, 500))
        required = SCHEMES[name].static_activation_scale
        for value in (None, 0.0, 1e-45, 1e-38) if name in STATIC or required else (None,):
            run = partial(run_zero_input, name, device, value)
            yield case(name, (1, 40), 96, 160, device, f"zero input, static scale {value}", run, out=FP32)
        yield case(name, (5,), 192, 320, device, "reload", partial(run_reload, name, device))
        if SCHEMES[name].activation.quantized:
            for m in (3, 64):
                run = partial(run_rounding, name, m, device)
                yield case(name, (m,), 320, 1024, device, "is what is computed", run)
        if scaled:
            yield case(name, (2, 48), 130, 320, device, "NaN", partial(run_no_number, name, device))
        if scaled and SCHEMES[name].weight_only and SCHEMES[name].weight != NVFP4:
            for x in (BF16, FP16):
                run = partial(run_far_apart, name, x, device)
                yield case(name, (5, 30, 2880), 160, 2880, device, f"scales far apart x={x}", run, x, FP32)


def random_cases(name: str, device: torch.device) -> Iterator[Case]:
    """Random data in many shapes, K rounded up to whole blocks."""
    usual, scheme = input_dtype(name), SCHEMES[name]
    multiple = max(scheme.weight.k_multiple, scheme.activation.k_multiple)

    def random(
        m: int, n: int, k: int, x: torch.dtype = usual, out: torch.dtype | None = None, bias: bool = True
    ) -> Case:
        k += -k % multiple
        run = partial(run_random, name, m, n, k, device, x, x if out is None else out, bias)
        return case(name, (m,), n, k, device, f"random x={x} out={out or x} bias={bias}", run, x, out)

    for m in (0, *TOKENS):
        yield random(m, 1024, 1024, bias=m % 2 == 0)
    for m in (1, 8, 33, 300):
        for n, k in ((2112, 576), (160, 2560), (320, 192), (2880, 2880), (17, 16), (1, 100), (200, 130), (8, 17)):
            yield random(m, n, k)
        yield random(m, 320, 640, out=FP32, bias=False)
    yield random(5, 5120, 17408)
    yield random(4096, 512, 7168)
    if scheme.weight.quantized:
        for m in (2, 16, 32, 96, 1024):
            yield random(m, 384, 1024, x=FP16)
    if in_tiles(name):
        for m in (5, 50):
            for n, k in itertools.product((160, 1, 17, 2112), (576, 2880, 160)):
                yield random(m, n, k, out=FP16 if scheme.activation.quantized else None)
