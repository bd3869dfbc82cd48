"""Tests of the linear kernels. Truth is float64 from the stored bytes; activations are quantized by the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from b12x_core.capabilities import Op, Tier, support_table
from b12x_core.formats import ALL, FP8_BLOCK, SCHEMES, Scheme
from b12x_core.ops._linear_kernel import kernels_for
from b12x_core.ops.linear import LinearWeights, linear, prepare_linear
from b12x_core.reference.quantize import dequantize, dequantize_activation, quantize
from b12x_core.runtime.devices import facts
from b12x_core.testing.bounds import bound
from b12x_core.testing.cases import Case, WrongResultError, busy_stream, equal, poison, within

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SERVED = tuple(row.scheme for row in support_table() if row.op is Op.LINEAR and row.kernels[Tier.PORTABLE])
STATIC = ("fp8-tensor", "fp8-channel-tensor")
TOKENS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 64, 65, 128, 200, 256, 512, 777, 1024, 1536, 2048)


def random_weight(scheme: Scheme, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A stored weight with outputs of about unit size. Scales are no powers of two."""
    weight = torch.randn(n, k, device=device) / k**0.5
    fmt = scheme.weight
    if not fmt.quantized:
        return weight.to(FP16 if fmt.name == "fp16" else BF16), None
    data = (weight * k**0.5 * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    return data, (torch.rand(fmt.scale_shape(n, k), device=device) + 1.0) / (64 * k**0.5)


def truth(
    x: torch.Tensor, w: LinearWeights, data: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Float64, from what is stored and the activation as the scheme quantizes it."""
    fmt = w.scheme.activation
    seen = dequantize_activation(quantize(x, fmt, w.input_scale)) if fmt.quantized else x
    wide = dequantize(data, w.scheme.weight, None).double() if scale is None else exact_weight(w.scheme, data, scale)
    y = seen.double() @ wide.t()
    return y if bias is None else y + bias.double()


def exact_weight(scheme: Scheme, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The stored weight in float64."""
    n, k = data.shape
    if scheme.weight == FP8_BLOCK:
        wide = scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    else:
        wide = scale.double().view(-1, 1)
    return data.double() * wide


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
    count = facts(device).multiprocessors
    specs = [
        spec for m in tokens for spec in kernels_for(SCHEMES[name], x, x if out is None else out, m, n, k, count) if m
    ]
    kernel = specs[0].name if specs else f"linear {name} without tokens"
    return Case(kernel, f"{name} {label} M={','.join(map(str, tokens))} N={n} K={k}", run, tuple(specs))


def input_dtype(name: str) -> torch.dtype:
    """The usual dtype of an activation in a scheme."""
    return FP16 if name == "fp16" else BF16


def run_random(
    name: str, m: int, n: int, k: int, device: torch.device, x_dtype: torch.dtype, out: torch.dtype, with_bias: bool
) -> float:
    """Random data; x is a view into NaN, outputs land in memory full of NaN."""
    scheme = SCHEMES[name]
    data, scale = random_weight(scheme, n, k, device)
    bias = torch.randn(n, device=device, dtype=x_dtype) if with_bias else None
    around = torch.full((m + 2, k + 24), float("nan"), device=device, dtype=x_dtype)
    x = around[1 : m + 1, 8 : 8 + k]
    x.copy_(torch.randn(m, k, device=device) * torch.exp(torch.randn(m, 1, device=device) * 2))
    static = (x.float().abs().amax() / 448).reshape(1) if name in STATIC and m % 2 else None
    w = prepare_linear(scheme, data, scale, input_scale=static, bias=bias)
    expected = truth(x, w, data, scale, bias)
    poison(device)
    y = linear(x, w, out_dtype=out)
    what = f"{name} M={m} N={n} K={k} x={x_dtype} out={out} bias={with_bias} static={static is not None}"
    return within(y, expected, bound("linear", out), what) if m else 0.0


def run_one_hot(name: str, n: int, k: int, device: torch.device) -> float:
    """One-hot rows read back the weight, exactly up to the rounding of the output."""
    scheme = SCHEMES[name]
    data, scale = random_weight(scheme, n, k, device)
    if scale is not None:  # few bits, so that products are exact; the scale of a block tells which one it is
        scale = 2.0 ** (torch.arange(scale.numel(), device=device) % 9 - 4).view(scale.shape)
    one = (
        torch.ones(1, device=device)
        if scheme.static_activation_scale is None and scheme.activation.block == (ALL, ALL)
        else None
    )
    x = torch.eye(k, device=device, dtype=input_dtype(name))
    w = prepare_linear(scheme, data, scale, input_scale=one)
    expected = truth(x, w, data, scale, None).to(FP32)
    for rows in (x, x[:7], x[-33:]):
        first = k - 33 if rows.shape[0] == 33 else 0
        y = linear(rows, w, out_dtype=FP32)
        wanted = expected[first : first + rows.shape[0]]
        if scheme.activation.quantized and one is None:  # 1 / 448 is no short number
            within(y, wanted.double(), bound("linear", FP32), f"{name} one-hot N={n} K={k} rows={rows.shape[0]}")
        else:
            equal(y, wanted, f"{name} one-hot N={n} K={k} rows={rows.shape[0]}")
    return 0.0


def run_repeats(name: str, m: int, n: int, k: int, device: torch.device, count: int) -> float:
    """The same bits each time, beside a busy stream."""
    scheme = SCHEMES[name]
    data, scale = random_weight(scheme, n, k, device)
    w = prepare_linear(scheme, data, scale)
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
    scheme = SCHEMES[name]
    data, scale = random_weight(scheme, 96, 160, device)
    input_scale = None if static is None else torch.tensor([static], device=device)
    bias = torch.randn(96, device=device)
    w = prepare_linear(scheme, data, scale, input_scale=input_scale, bias=bias)
    for m in (1, 40):
        y = linear(torch.zeros(m, 160, device=device, dtype=input_dtype(name)), w, out_dtype=FP32)
        equal(y, bias.expand(m, -1).contiguous(), f"{name} x=0 static={static} M={m}")
    return 0.0


def run_reload(name: str, device: torch.device) -> float:
    """Preparing into earlier weights keeps addresses; a recorded graph then serves the new ones."""
    scheme = SCHEMES[name]
    old, new = (random_weight(scheme, 192, 320, device) for _ in range(2))
    x = torch.randn(5, 320, device=device, dtype=input_dtype(name))
    w = prepare_linear(scheme, *old)
    linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, w)
    again = prepare_linear(scheme, *new, into=w)
    if again is not w:
        raise WrongResultError(f"{name}: preparing into weights returned others")
    graph.replay()
    equal(y, linear(x, prepare_linear(scheme, *new)), f"{name} reload")
    return 0.0


def cases(device: torch.device) -> Iterator[Case]:
    """All of them."""
    for name in SERVED:
        yield from random_cases(name, device)
        for n, k in ((192, 128), (320, 128), (2624, 128), (64, 192), (2112, 64), (80, 576)):
            run = partial(run_one_hot, name, n, k, device)
            yield case(name, (k, 7, 33), n, k, device, "one-hot", run, out=FP32)
        for m, n, k in ((1, 2880, 2880), (16, 512, 8192), (100, 640, 4096), (512, 2048, 2048)):
            yield case(name, (m,), n, k, device, "repeats", partial(run_repeats, name, m, n, k, device, 500))
        static = (None, 0.0, 1e-45, 1e-38) if name in STATIC else (None,)
        for value in static:
            run = partial(run_zero_input, name, device, value)
            yield case(name, (1, 40), 96, 160, device, f"zero input, static scale {value}", run, out=FP32)
        yield case(name, (5,), 192, 320, device, "reload", partial(run_reload, name, device))


def random_cases(name: str, device: torch.device) -> Iterator[Case]:
    """Random data in many shapes."""
    usual = input_dtype(name)

    def random(
        m: int, n: int, k: int, x: torch.dtype = usual, out: torch.dtype | None = None, bias: bool = True
    ) -> Case:
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
    if SCHEMES[name].weight.quantized:
        for m in (2, 16, 32, 96, 1024):
            yield random(m, 384, 1024, x=FP16)
