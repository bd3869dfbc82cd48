"""Cases of a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from b12x_core.activations import (
    GELU,
    GELU_NOT_GATED,
    GELU_TANH,
    GELU_TANH_NOT_GATED,
    RELU2,
    RELU2_NOT_GATED,
    SILU,
    SILU_NOT_GATED,
    Activation,
    SwiGLU,
)
from b12x_core.adapters import MoECase
from b12x_core.testing import bounds

from b12x_conformance.cases import generator
from b12x_conformance.cases.forms import FORMS, GPT_OSS, Form, input_scale, random_input, random_weight
from b12x_conformance.oracle import Quantized
from b12x_conformance.oracle.linear import ACTIVATION_RULE
from b12x_conformance.oracle.moe import Expert
from b12x_conformance.oracle.moe import moe as expected_moe

GPT_OSS_ACTIVATION = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
Routes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MoEProblem:
    """A mixture of experts, its inputs and routes, and what must come out.

    Attributes:
        id: of the test.
        form: name of a form of checkpoint, or "gpt-oss-mxfp4".
        experts, top_k, hidden, intermediate, activation, dtype, ep_rank, ep_size, router_weight_on_input: as in
            `MoECase`.
        tokens: numbers of rows to run, one after the other through the same layer.
        weights: makes all experts of the layer.
        inputs: makes an input of a number of rows.
        routing: makes routed weights and global expert ids for a number of rows.
        routed_scaling: multiplies the routed weights, as a router with that factor does.
        gain: multiplies random inputs; at 1 the projections have an rms near 2, where no activation is linear.
        exact: the output must be equal to the rounded truth; otherwise within the bound.
    """

    id: str
    form: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation = SILU
    tokens: tuple[int, ...] = (1, 5, 33)
    weights: Callable[[MoEProblem, torch.Generator], list[Expert]] = field(default_factory=lambda: random_experts)
    inputs: Callable[[MoEProblem, int, torch.Generator], torch.Tensor] = field(default_factory=lambda: random_inputs)
    routing: Callable[[MoEProblem, int, torch.Generator], Routes] = field(default_factory=lambda: random_routes)
    routed_scaling: float = 1.0
    router_weight_on_input: bool = False
    ep_rank: int = 0
    ep_size: int = 1
    gain: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    exact: bool = False

    @property
    def stored(self) -> Form:
        """The form of checkpoint."""
        return GPT_OSS if self.form == GPT_OSS.name else FORMS[self.form]

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes that may serve it."""
        return self.stored.schemes_of(self.activation.rows)

    @property
    def local(self) -> range:
        """The experts of this rank."""
        share = self.experts // self.ep_size
        return range(self.ep_rank * share, (self.ep_rank + 1) * share)

    def build(self, device: str) -> MoESample:
        """The checkpoint of the layer."""
        rng = generator(self.id)
        experts = self.weights(self, rng)
        tensors = gpt_oss_tensors(experts) if self.stored is GPT_OSS else expert_tensors(self.stored, experts)
        case = MoECase(
            tensors=tensors,
            num_experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
            quantization=self.stored.config,
            activation=self.activation,
            dtype=self.dtype,
            device=device,
            router_weight_on_input=self.router_weight_on_input,
            ep_rank=self.ep_rank,
            ep_size=self.ep_size,
        )
        return MoESample(self, case, experts, rng)


@dataclass(frozen=True)
class MoESample:
    """A `MoEProblem` with its tensors."""

    problem: MoEProblem
    case: MoECase
    experts: list[Expert]
    rng: torch.Generator

    def input(self, m: int) -> torch.Tensor:
        """An input of m rows."""
        return self.problem.inputs(self.problem, m, self.rng).to(self.problem.dtype)

    def routes(self, m: int) -> Routes:
        """Weights (m, k) float32 and ids (m, k) int32."""
        weights, ids = self.problem.routing(self.problem, m, self.rng)
        return weights * self.problem.routed_scaling, ids.int()

    def expected(self, x: torch.Tensor, routes: Routes, scheme: str) -> torch.Tensor:
        """The truth in float64 for a layer that was served in `scheme`."""
        return expected_moe(
            x,
            *routes,
            self.experts,
            self.problem.activation,
            ACTIVATION_RULE[scheme],
            local=self.problem.local,
            router_weight_on_input=self.problem.router_weight_on_input,
        )

    def bound(self, scheme: str) -> bounds.Bound:
        """How far the output may be from the truth for a layer that was served in `scheme`."""
        return bounds.bound(bounds.moe_recipe(ACTIVATION_RULE[scheme]), self.problem.dtype)


# Names in the checkpoint


def expert_tensors(form: Form, experts: list[Expert]) -> dict[str, torch.Tensor]:
    """Tensors named "<expert>.<projection>.<tensor>"."""
    tensors: dict[str, torch.Tensor] = {}
    for number, expert in enumerate(experts):
        projections = (
            ("gate_proj", expert.gate, expert.input_scale),
            ("up_proj", expert.up, expert.input_scale),
            ("down_proj", expert.down, expert.down_input_scale),
        )
        for name, weight, scale in projections:
            if weight is not None:
                tensors |= form.tensors(f"{number}.{name}", weight, scale)
    return tensors


def gpt_oss_tensors(experts: list[Expert]) -> dict[str, torch.Tensor]:
    """Fused tensors of gpt-oss: all experts in one, rows of gate and up alternating."""

    def stacked(weights: list[Quantized | torch.Tensor | None], part: str) -> torch.Tensor:
        return torch.stack([getattr(weight, part) for weight in weights])

    def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack([gate, up], dim=2).flatten(1, 2)

    def blocks(data: torch.Tensor) -> torch.Tensor:
        return data.reshape(*data.shape[:-1], -1, 16)

    gates, ups, downs = ([getattr(e, name) for e in experts] for name in ("gate", "up", "down"))
    biases = {name: torch.stack([getattr(e, f"{name}_bias") for e in experts]) for name in ("gate", "up", "down")}
    return {
        "gate_up_proj_blocks": blocks(alternating(stacked(gates, "data"), stacked(ups, "data"))),
        "gate_up_proj_scales": alternating(stacked(gates, "scale"), stacked(ups, "scale")),
        "gate_up_proj_bias": alternating(biases["gate"], biases["up"]),
        "down_proj_blocks": blocks(stacked(downs, "data")),
        "down_proj_scales": stacked(downs, "scale"),
        "down_proj_bias": biases["down"],
    }


# Weights


def random_experts(problem: MoEProblem, rng: torch.Generator) -> list[Expert]:
    """All codes at random; per-tensor and global scales differ between experts, and between gate and up.

    FP8 input scales are equal over the experts of a layer, NVFP4 ones are not: an FP8 activation is quantized once for
    all experts, an NVFP4 one for each.
    """
    form, hidden, intermediate = problem.stored, problem.hidden, problem.intermediate
    experts = []
    for number in range(problem.experts):
        spread = 1 + 0.25 * (number % 3) if form.weight == "nvfp4" else 1.0
        gate = random_weight(form, intermediate, hidden, rng, number % 2) if problem.activation.gated else None
        up = random_weight(form, intermediate, hidden, rng, number % 2 + 1)
        down = random_weight(form, hidden, intermediate, rng, number % 3)
        biases: dict[str, torch.Tensor] = {}
        if form is GPT_OSS:
            rows = {"gate_bias": intermediate, "up_bias": intermediate, "down_bias": hidden}
            biases = {name: torch.randn(n, generator=rng).bfloat16() for name, n in rows.items()}
        experts.append(
            Expert(
                gate,
                up,
                down,
                input_scale(form, spread * 24 * problem.gain / math.sqrt(hidden)),
                input_scale(form, spread * 32 * problem.gain),
                **biases,
            )
        )
    return experts


def constant_gates(problem: MoEProblem, rng: torch.Generator) -> list[Expert]:
    """Gate projections of 1, so that all gates of a one-hot input equal its value; the rest is random."""
    ones = _same_along_k(torch.ones(problem.intermediate, problem.hidden))
    return [replace(expert, gate=ones) for expert in random_experts(problem, rng)]


def expert_bits(problem: MoEProblem, rng: torch.Generator) -> list[Expert]:
    """Up projections of 1; column c of expert e's output is bit c % 16 of e + 1, so the output names the experts.

    With `one_hot` inputs, relu2 without a gate and routed weights of few bits every step is exact.
    """
    del rng
    assert problem.activation == RELU2_NOT_GATED
    form, hidden, intermediate = problem.stored, problem.hidden, problem.intermediate
    one = torch.tensor(1.0) if form.static_input else None
    up = _same_along_k(torch.ones(intermediate, hidden))
    bit = torch.arange(hidden) % 16
    columns = torch.ones(1, intermediate)
    downs = [_same_along_k(((number + 1) >> bit & 1)[:, None] * columns) for number in range(problem.experts)]
    return [Expert(None, up, down, one, one) for down in downs]


def _same_along_k(values: torch.Tensor) -> Quantized:
    """An NVFP4 matrix of zeros and ones whose rows are constant."""
    scale = torch.ones(values.shape[0], values.shape[1] // 16).to(torch.float8_e4m3fn)
    return Quantized("nvfp4", (values * 0x22).to(torch.uint8)[:, ::2].contiguous(), scale, torch.tensor(1.0))


# Inputs


def random_inputs(problem: MoEProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """Normal values of a size that gives projections with an rms near 2 * gain."""
    return random_input(m, problem.hidden, torch.float32, rng) * (problem.gain * 4 / math.sqrt(problem.hidden))


def sparse_tokens(problem: MoEProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """Random, but every other token is all zero, and so are the first 64 channels of the others."""
    x = random_inputs(problem, m, rng)
    x[:, :64] = 0
    x[1::2] = 0
    return x


def one_hot(problem: MoEProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """Row i is 6 at channel i: in NVFP4 with an input scale of 1 it is exact, and so is its square."""
    del rng
    return torch.eye(problem.hidden)[torch.arange(m) % problem.hidden] * 6.0


def minus_three(problem: MoEProblem, m: int, rng: torch.Generator) -> torch.Tensor:
    """Row i is -3 at channel i."""
    return one_hot(problem, m, rng) * -0.5


# Routes


def random_routes(problem: MoEProblem, m: int, rng: torch.Generator) -> Routes:
    """Distinct experts a token, weights that add up to 1."""
    scores = torch.rand(m, problem.experts, generator=rng)
    ids = scores.topk(problem.top_k, dim=1).indices
    weights = torch.softmax(torch.randn(m, problem.top_k, generator=rng), dim=1)
    return weights, ids


def one_busy_expert(problem: MoEProblem, m: int, rng: torch.Generator) -> Routes:
    """The first choice of every token is the last expert; the rest is random."""
    weights, ids = random_routes(problem, m, rng)
    last = problem.experts - 1
    ids = torch.where(ids == last, ids[:, :1], ids)
    ids[:, 0] = last
    return weights, ids


def bf16_routes(problem: MoEProblem, m: int, rng: torch.Generator) -> Routes:
    """Random routes with weights that bf16 holds exactly, for engines that multiply inputs in bf16."""
    weights, ids = random_routes(problem, m, rng)
    # One weight a token is always 1 after a softmax; a factor below 1 shows whether it was applied.
    return (weights * (0.25 + torch.rand(m, 1, generator=rng))).bfloat16().float(), ids


def coarse_routes(problem: MoEProblem, m: int, rng: torch.Generator) -> Routes:
    """Distinct experts a token, slot i with weight (i + 1) / 64: sums of them are exact in bf16."""
    _, ids = random_routes(problem, m, rng)
    return ((torch.arange(problem.top_k) + 1.0) / 64).expand(m, -1).contiguous(), ids


def with_sentinels(routes: Routes, rng: torch.Generator) -> Routes:
    """A third of the routes, and all of the second token, become -1. Their weights stay: they must not count."""
    weights, ids = routes
    ids = torch.where(torch.rand(ids.shape, generator=rng) < 1 / 3, -1, ids)
    ids[1:2] = -1
    return weights, ids


def random_routes_with_sentinels(problem: MoEProblem, m: int, rng: torch.Generator) -> Routes:
    """`random_routes` with some ids -1."""
    return with_sentinels(random_routes(problem, m, rng), rng)


def coarse_routes_with_sentinels(problem: MoEProblem, m: int, rng: torch.Generator) -> Routes:
    """`coarse_routes` with some ids -1."""
    return with_sentinels(coarse_routes(problem, m, rng), rng)


# Problems

SHAPES = {
    "smollm2-split": (4, 4, 576, 384),
    "qwen3-30b-shard": (16, 8, 2048, 128),
    "gpt-oss-hidden": (8, 4, 2880, 128),
    "gpt-oss-intermediate": (4, 2, 128, 2880),
    "flash-next-shard": (16, 10, 320, 160),
}
"""(experts, top-k, H, I) of real models with fewer experts, or with H or I cut to a slice."""

_ACTIVATIONS = {
    "silu": SILU,
    "gelu": GELU,
    "gelu-tanh": GELU_TANH,
    "relu2": RELU2,
    "swiglu": GPT_OSS_ACTIVATION,
    "silu-not-gated": SILU_NOT_GATED,
    "gelu-not-gated": GELU_NOT_GATED,
    "gelu-tanh-not-gated": GELU_TANH_NOT_GATED,
    "relu2-not-gated": RELU2_NOT_GATED,
}


def _grid() -> Iterator[MoEProblem]:
    for form in FORMS:
        for name, shape in SHAPES.items():
            yield MoEProblem(f"{form}-{name}", form, *shape)
        yield MoEProblem(f"{form}-relu2-not-gated", form, 8, 6, 256, 128, RELU2_NOT_GATED)
        yield MoEProblem(f"{form}-zero-tokens", form, 8, 2, 256, 128, inputs=sparse_tokens)
    for form in ("modelopt-nvfp4", "compressed-mxfp4-w4a16", "fp8-block"):
        yield MoEProblem(f"{form}-512-experts", form, 512, 10, 128, 128, tokens=(1, 9))
        yield MoEProblem(f"{form}-288-experts", form, 288, 8, 128, 128, tokens=(1, 9))
        yield MoEProblem(f"{form}-one-busy-expert", form, 8, 2, 256, 128, tokens=(130,), routing=one_busy_expert)
        yield MoEProblem(f"{form}-fp16", form, 8, 2, 256, 128, dtype=torch.float16, gain=0.25)
        yield MoEProblem(
            f"{form}-router-weight-on-input", form, 8, 1, 256, 128, routing=bf16_routes, router_weight_on_input=True
        )
    for name, (experts, top_k, hidden, intermediate) in {
        "hidden": (8, 4, 2880, 96),
        "intermediate": (4, 4, 96, 2880),
        "32-experts": (32, 4, 288, 288),
    }.items():
        yield MoEProblem(
            f"{GPT_OSS.name}-{name}", GPT_OSS.name, experts, top_k, hidden, intermediate, GPT_OSS_ACTIVATION
        )


def _kinds() -> Iterator[MoEProblem]:
    for form in ("modelopt-nvfp4", "fp8-tensor", "compressed-fp8-channel"):
        for intermediate in (160, 928, 1856):
            # 1856 rows by 2688 columns in 8 experts are the whole layer; two of them have the same edges.
            experts, top_k = (8, 6) if form == "modelopt-nvfp4" or intermediate == 160 else (2, 2)
            yield MoEProblem(
                f"kind-11-intermediate-{intermediate}-{form}", form, experts, top_k, 2688, intermediate,
                RELU2_NOT_GATED, tokens=(1, 9),
            )  # fmt: skip
    for rank in (0, 3, 7):
        yield MoEProblem(
            f"kind-12-expert-parallel-exact-rank-{rank}", "modelopt-nvfp4", 384, 8, 64, 64, RELU2_NOT_GATED,
            weights=expert_bits, inputs=one_hot, routing=coarse_routes, exact=True, ep_rank=rank, ep_size=8,
        )  # fmt: skip
        for form in ("modelopt-nvfp4", "compressed-mxfp4-w4a16", "fp8-block"):
            yield MoEProblem(
                f"kind-12-expert-parallel-rank-{rank}-{form}", form, 384, 8, 128, 128, ep_rank=rank, ep_size=8
            )
    yield MoEProblem(
        "kind-13-sentinel-exact", "modelopt-nvfp4", 36, 8, 64, 64, RELU2_NOT_GATED, weights=expert_bits,
        inputs=one_hot, routing=coarse_routes_with_sentinels, exact=True,
    )  # fmt: skip
    yield MoEProblem(
        "kind-13-sentinel-expert-parallel-exact", "modelopt-nvfp4", 36, 8, 64, 64, RELU2_NOT_GATED,
        weights=expert_bits, inputs=one_hot, routing=coarse_routes_with_sentinels, exact=True, ep_rank=1, ep_size=2,
    )  # fmt: skip
    for form in ("modelopt-nvfp4", "modelopt-nvfp4-w4a16", "compressed-mxfp4", "fp8-block", "fp8-tensor", "bf16"):
        yield MoEProblem(f"kind-13-sentinel-{form}", form, 36, 4, 128, 128, routing=random_routes_with_sentinels)
    yield MoEProblem(
        "kind-13-sentinel-gpt-oss", GPT_OSS.name, 36, 4, 128, 128, GPT_OSS_ACTIVATION,
        routing=random_routes_with_sentinels,
    )  # fmt: skip
    for form in FORMS:
        yield MoEProblem(f"kind-14-no-tokens-{form}", form, 4, 2, 128, 128, tokens=(0, 1, 0))
    yield MoEProblem("kind-14-no-tokens-gpt-oss", GPT_OSS.name, 4, 2, 128, 128, GPT_OSS_ACTIVATION, tokens=(0, 1, 0))
    # silu(-7) is almost 0, so only a small limit shows that a gate is clamped from above alone.
    limits: dict[str, tuple[str, Activation]] = {
        "silu-1": ("modelopt-nvfp4-w4a16", Activation("silu", limit=1.0)),
        "silu-none": ("modelopt-nvfp4-w4a16", SILU),
        "silu-7": ("modelopt-nvfp4-w4a16", Activation("silu", limit=7.0)),
        "silu-10": ("modelopt-nvfp4-w4a16", Activation("silu", limit=10.0)),
        "silu-none-mxfp4": ("compressed-mxfp4-w4a16", SILU),
        "silu-10-mxfp4": ("compressed-mxfp4-w4a16", Activation("silu", limit=10.0)),
        "silu-10-fp8": ("fp8-block", Activation("silu", limit=10.0)),
        "gpt-oss-7": (GPT_OSS.name, GPT_OSS_ACTIVATION),
        "gpt-oss-10": (GPT_OSS.name, SwiGLU(1.702, 1.0, 10.0)),
        "swiglu-none": ("modelopt-nvfp4-w4a16", SwiGLU(1.702, 1.0)),
    }
    for name, (form, activation) in limits.items():
        # Projections with an rms near 10 reach from -20 to 20 and beyond.
        yield MoEProblem(f"kind-15-clamp-{name}", form, 4, 2, 128, 128, activation, gain=5.0)
    # The two functions differ by less than bf16 can tell, except for gates near -3, where they differ by a tenth.
    for name in ("gelu", "gelu-tanh"):
        yield MoEProblem(
            f"kind-22-few-tokens-{name}-tail", "modelopt-nvfp4-w4a16", 8, 2, 128, 96, _ACTIVATIONS[name],
            tokens=(1, 2, 3), weights=constant_gates, inputs=minus_three,
        )  # fmt: skip
    for name, activation in _ACTIVATIONS.items():
        for top_k in (1, 8, 22):
            yield MoEProblem(
                f"kind-22-few-tokens-{name}-top-{top_k}", "modelopt-nvfp4", 32, top_k, 128, 96, activation,
                tokens=(1, 2, 3), routed_scaling=2.5,
            )  # fmt: skip


PROBLEMS: tuple[MoEProblem, ...] = (*_kinds(), *_grid())
