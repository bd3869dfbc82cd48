"""Cases of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from b12x_core.adapters import LinearCase
from b12x_core.testing import bounds

from b12x_conformance.cases import generator
from b12x_conformance.cases.forms import FORMS, Form, input_scale, random_input, random_quantized
from b12x_conformance.oracle import Quantized
from b12x_conformance.oracle.linear import ACTIVATION_RULE
from b12x_conformance.oracle.linear import linear as expected_linear

Shards = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class LinearProblem:
    """A linear layer, its inputs, and what must come out.

    Attributes:
        id: of the test.
        form: name of a form of checkpoint.
        shards, k, head_size, dtype: as in `LinearCase`.
        tokens: numbers of rows to run, one after the other through the same layer.
        weights: makes the stored weights of all shards.
        inputs: makes an input of a number of rows.
        input_scale: static scale, None for a plausible one.
        bias: whether the layer has a bias.
        exact: the output must be equal to the rounded truth; otherwise within the bound.
        repeats: how often to run every input; each result must be equal to the first one, bit by bit.
    """

    id: str
    form: str
    shards: Shards
    k: int
    tokens: tuple[int, ...] = (1, 3, 17, 64)
    weights: Callable[[LinearProblem, torch.Generator], list[Quantized]] = field(default_factory=lambda: random_shards)
    inputs: Callable[[LinearProblem, int, torch.Generator], torch.Tensor] = field(default_factory=lambda: random_inputs)
    input_scale: float | None = None
    bias: bool = False
    head_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    exact: bool = False
    repeats: int = 1

    @property
    def stored(self) -> Form:
        """The form of checkpoint."""
        return FORMS[self.form]

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes that may serve it."""
        return self.stored.schemes_of(len(self.shards))

    @property
    def n(self) -> int:
        """Rows of all shards."""
        return sum(rows for _, rows in self.shards)

    def build(self, device: str) -> LinearSample:
        """The checkpoint of the layer."""
        rng = generator(self.id)
        weights = self.weights(self, rng)
        if self.input_scale is None:
            scale = input_scale(self.stored)
        else:
            scale = torch.tensor(self.input_scale, dtype=torch.float32)
        bias = torch.randn(self.n, generator=rng).to(self.dtype) if self.bias else None
        tensors: dict[str, torch.Tensor] = {}
        for (name, _), weight in zip(self.shards, weights, strict=True):
            tensors |= self.stored.tensors(name, weight, scale)
        if bias is not None:
            parts = bias.split([rows for _, rows in self.shards])
            tensors |= {f"{name}.bias": part for (name, _), part in zip(self.shards, parts, strict=True)}
        case = LinearCase(
            shards=self.shards,
            k=self.k,
            tensors=tensors,
            quantization=self.stored.config,
            dtype=self.dtype,
            device=device,
            head_size=self.head_size,
        )
        return LinearSample(self, case, weights, scale, bias, rng)


@dataclass(frozen=True)
class LinearSample:
    """A `LinearProblem` with its tensors."""

    problem: LinearProblem
    case: LinearCase
    weights: list[Quantized]
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    rng: torch.Generator

    def input(self, m: int) -> torch.Tensor:
        """An input of m rows."""
        return self.problem.inputs(self.problem, m, self.rng).to(self.problem.dtype)

    def expected(self, x: torch.Tensor, scheme: str) -> torch.Tensor:
        """The truth in float64 for a layer that was served in `scheme`."""
        rule = ACTIVATION_RULE[scheme]
        scale = self.input_scale if rule in ("nvfp4", "fp8-tensor") else None
        return expected_linear(x, self.weights, rule, input_scale=scale, bias=self.bias)

    def bound(self) -> bounds.Bound:
        """How far the output may be from the truth."""
        return bounds.bound("linear", self.problem.dtype)


# Weights


def random_shards(problem: LinearProblem, rng: torch.Generator) -> list[Quantized]:
    """All codes at random; per-tensor and global scales differ between the shards."""
    return [random_quantized(problem.stored, n, problem.k, rng, shard) for shard, (_, n) in enumerate(problem.shards)]


def few_bits(problem: LinearProblem, rng: torch.Generator) -> list[Quantized]:
    """All codes at random, fp32 scales of 8 significant bits: every product is exact in float32."""

    def short(scale: torch.Tensor) -> torch.Tensor:
        return scale.bfloat16().float() if scale.dtype == torch.float32 else scale

    return [
        replace(w, scale=short(w.scale), global_scale=None if w.global_scale is None else short(w.global_scale))
        for w in random_shards(problem, rng)
    ]


def _ones(problem: LinearProblem, n: int, scale: torch.Tensor, global_scale: float | None = None) -> Quantized:
    """Elements of 1.0 with the scales given."""
    weight = problem.stored.weight
    assert weight is not None
    if weight in ("mxfp4", "nvfp4"):
        data = torch.full((n, problem.k // 2), 0x22, dtype=torch.uint8)
    else:
        data = torch.ones(n, problem.k).to(torch.float8_e4m3fn)
    return Quantized(weight, data, scale, None if global_scale is None else torch.tensor(global_scale))


def ones(problem: LinearProblem, rng: torch.Generator) -> list[Quantized]:
    """Every weight is 1."""
    del rng
    n, k = problem.n, problem.k
    if problem.stored.weight == "mxfp4":
        return [_ones(problem, n, torch.full((n, k // 32), 127, dtype=torch.uint8))]
    return [_ones(problem, n, torch.ones(n, k // 16).to(torch.float8_e4m3fn), 1.0)]


def block_index(problem: LinearProblem, rng: torch.Generator) -> list[Quantized]:
    """Elements of 1; the scale of a 128 x 128 block is its index, from 1 on."""
    del rng
    rows, columns = -(-problem.n // 128), -(-problem.k // 128)
    scale = torch.arange(1, rows * columns + 1, dtype=torch.float32).reshape(rows, columns)
    return [_ones(problem, problem.n, scale)]


def block_fractions(problem: LinearProblem, rng: torch.Generator) -> list[Quantized]:
    """Elements of 1; block scales 1 + i / 128, so rounding them to powers of two costs up to half of the result."""
    blocks = (-(-problem.n // 128), -(-problem.k // 128))
    scale = 1 + torch.randint(0, 128, blocks, generator=rng) / 128
    return [_ones(problem, problem.n, scale)]


def distinct_scales(problem: LinearProblem, rng: torch.Generator) -> list[Quantized]:
    """Elements of 1; e4m3 scales that differ from those beside, above and below, over all positive codes."""
    del rng
    row = torch.arange(problem.n)[:, None]
    group = torch.arange(problem.k // 16)[None, :]
    codes = (1 + (7 * row + 13 * group) % 126).to(torch.uint8)
    return [_ones(problem, problem.n, codes.view(torch.float8_e4m3fn), 1.0)]


def head_constants(problem: LinearProblem, rng: torch.Generator) -> list[Quantized]:
    """Every head is a constant of its own, every shard has scales of its own."""
    del rng
    assert problem.head_size is not None
    weights = []
    for shard, (_, n) in enumerate(problem.shards):
        constant = 1.0 + (torch.arange(n) // problem.head_size) % 16
        step = 2.0**-shard
        if problem.form == "fp8-block":
            scale = constant[::128, None].expand(-1, -(-problem.k // 128)) * step
            weights.append(_ones(problem, n, scale.contiguous()))
        elif problem.stored.weight == "nvfp4":
            scale = constant[:, None].expand(-1, problem.k // 16).to(torch.float8_e4m3fn)
            weights.append(_ones(problem, n, scale.contiguous(), step))
        elif problem.stored.weight == "fp8-channel":
            weights.append(_ones(problem, n, constant[:, None] * step))
        else:
            assert problem.stored.weight == "fp8-tensor"
            data = constant[:, None].expand(n, problem.k).to(torch.float8_e4m3fn)
            weights.append(Quantized("fp8-tensor", data, torch.tensor(step)))
    return weights


# Inputs


def random_inputs(problem: LinearProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """Normal values; tokens and channels differ in magnitude."""
    return random_input(m, problem.k, problem.dtype, rng)


def one_hot(problem: LinearProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """Row i is the largest element of the activation format at k = i, modulo K: its scale is 1 and it is exact."""
    del rng
    largest = 6.0 if problem.stored.weight in ("mxfp4", "nvfp4") else 448.0
    return torch.eye(problem.k)[torch.arange(m) % problem.k] * largest


def ties(problem: LinearProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """A 6 and then fives: e2m1 has 4 and 6, so each 5 becomes the even 4. 16-bit activations keep it."""
    del rng
    return torch.where(torch.arange(problem.k) % 16 == 0, 6.0, 5.0).expand(m, -1)


def zeros(problem: LinearProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """All zero."""
    del rng
    return torch.zeros(m, problem.k)


def sparse_tokens(problem: LinearProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """Random, but every other token is all zero, and so is one block of 128 of the others."""
    x = random_input(m, problem.k, problem.dtype, rng)
    x[:, :128] = 0
    x[1::2] = 0
    return x


# Problems


def _plain(n: int) -> Shards:
    return (("o_proj", n),)


def _qkv(heads: int, kv_heads: int, size: int) -> Shards:
    return (("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size))


def _gate_up(n: int) -> Shards:
    return (("gate_proj", n), ("up_proj", n))


SHAPES = {
    "gpt-oss-shard": (720, 2880),
    "gpt-oss-wide": (2880, 96),
    "flash-next-gate-shard": (160, 2560),
    "flash-next-down-shard": (2560, 160),
    "deepseek-latent": (2112, 448),
    "smollm2-down": (576, 1536),
    "nemotron-shard": (928, 1344),
    "qwen-down-slice": (128, 17408),
    "tiny": (33, 96),
}
"""(N, K) of real models, cut in one dimension to a shard or slice where they are large."""

_LINEAR_FORMS = tuple(name for name, form in FORMS.items() if form.weight is not None)
_FP16_FORMS = ("modelopt-nvfp4", "modelopt-nvfp4-w4a16", "compressed-mxfp4", "compressed-fp8-channel", "fp8-block")


def _grid() -> Iterator[LinearProblem]:
    for form in _LINEAR_FORMS:
        for name, (n, k) in SHAPES.items():
            yield LinearProblem(f"{form}-{name}", form, _plain(n), k)
        yield LinearProblem(f"{form}-bias", form, _plain(320), 576, bias=True)
        yield LinearProblem(
            f"{form}-one-hot", form, _plain(192), 320, (320,), weights=few_bits, inputs=one_hot, exact=True,
            input_scale=1.0 if FORMS[form].static_input else None,
        )  # fmt: skip
        yield LinearProblem(f"{form}-zero-tokens", form, _plain(192), 320, (2, 7), inputs=sparse_tokens)
        yield LinearProblem(f"{form}-fused-qkv-bias", form, _qkv(8, 2, 64), 576, bias=True, head_size=64)
        yield LinearProblem(f"{form}-fused-qkv-smollm2", form, _qkv(9, 3, 64), 576, head_size=64)
        yield LinearProblem(f"{form}-fused-gate-up", form, _gate_up(384), 576)
        yield LinearProblem(f"{form}-fused-gate-up-shard", form, _gate_up(160), 640)
    for form in _FP16_FORMS:
        yield LinearProblem(f"{form}-fp16", form, _plain(320), 576, dtype=torch.float16)


def _kinds() -> Iterator[LinearProblem]:
    many = (1, 8, 32, 128, 256, 512, 1024, 1536, 2048)
    yield LinearProblem("kind-01-zero-output-for-some-m", "modelopt-nvfp4", _plain(1024), 1024, many)
    for form in _LINEAR_FORMS:
        yield LinearProblem(f"kind-02-same-bits-every-time-{form}", form, _plain(192), 320, (1, 17), repeats=1000)
    for n in (192, 320, 2624):
        yield LinearProblem(
            f"kind-03-n-not-multiple-of-128-n{n}", "fp8-block", _plain(n), 128, (1, 128),
            weights=few_bits, inputs=one_hot, exact=True,
        )  # fmt: skip
    for n, k in ((2112, 64), (2112, 192), (2112, 576), (64, 2112), (192, 2112), (576, 2112)):
        yield LinearProblem(
            f"kind-04-shard-not-multiple-of-128-n{n}-k{k}", "fp8-block", _plain(n), k, (1, k),
            weights=block_index, inputs=one_hot, exact=True,
        )  # fmt: skip
    for form in ("modelopt-nvfp4", "modelopt-nvfp4-w4a16", "compressed-nvfp4", "compressed-nvfp4-w4a16"):
        yield LinearProblem(
            f"kind-05-scale-padding-{form}", form, _plain(160), 2560, (1, 2560), weights=distinct_scales,
            inputs=one_hot, exact=True, input_scale=1.0 if FORMS[form].static_input else None,
        )  # fmt: skip
    yield LinearProblem(
        "kind-06-fp32-block-scales-kept", "fp8-block", _plain(640), 576, (1, 576), weights=block_fractions,
        inputs=one_hot, exact=True,
    )  # fmt: skip
    for form in ("modelopt-nvfp4", "fp8-tensor", "compressed-fp8-tensor"):
        for scale in (0.0, 1e-45, 1e-38):
            for name, inputs in (("zero", zeros), ("random", random_inputs)):
                yield LinearProblem(
                    f"kind-07-input-scale-{scale:g}-{name}-{form}", form, _plain(192), 320, (1, 17), inputs=inputs,
                    input_scale=scale, bias=True, exact=inputs is zeros,
                )  # fmt: skip
    for form in _LINEAR_FORMS:
        if FORMS[form].weight in ("mxfp4", "nvfp4"):
            yield LinearProblem(
                f"kind-09-activations-quantized-as-asked-{form}", form, _plain(192), 320, (1, 17), weights=ones,
                inputs=ties, exact=True, input_scale=1.0 if FORMS[form].static_input else None,
            )  # fmt: skip
    for form in ("modelopt-nvfp4", "modelopt-nvfp4-w4a16", "fp8-block", "fp8-tensor", "compressed-fp8-channel"):
        for name, heads, kv_heads in (("tp1", 64, 4), ("tp4", 16, 1)):
            yield LinearProblem(
                f"kind-10-fused-qkv-scales-differ-{name}-{form}", form, _qkv(heads, kv_heads, 128), 128, (1, 32),
                weights=head_constants, inputs=one_hot, exact=True, head_size=128,
                input_scale=1.0 if FORMS[form].static_input else None,
            )  # fmt: skip


PROBLEMS: tuple[LinearProblem, ...] = (*_kinds(), *_grid())
