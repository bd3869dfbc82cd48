"""Small MoE checkpoints in every format, each with what its layer computes, in plain float32 written for the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from b12x_core import SILU, Activation, SwiGLU
from b12x_core.adapters import MoECase
from torch.nn import functional

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Quantize = Callable[[torch.Tensor], torch.Tensor]
"""Rounds (rows, K) float32 to what a format can hold."""


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest values, ties to the even code."""
    distance = (x.abs().unsqueeze(-1) - E2M1).abs() + torch.tensor([0, 1e-7] * 4)
    return distance.argmin(-1).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(code: torch.Tensor) -> torch.Tensor:
    return E2M1[(code & 7).long()] * torch.where(code & 8 > 0, -1.0, 1.0)


def pack(code: torch.Tensor) -> torch.Tensor:
    return code[..., 0::2] | (code[..., 1::2] << 4)


def blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    return functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def mx_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-30) / largest)))


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def fp8_by(size: int | None) -> Quantize:
    """Dynamic e4m3, a scale for each group of `size` columns, the whole row (-1), or everything (None)."""

    def quantize(x: torch.Tensor) -> torch.Tensor:
        grouped = x.reshape(1, -1) if size is None else blocks(x, x.shape[-1] if size == -1 else size)
        scale = (grouped.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
        y = e4m3(grouped / scale).float() * scale
        return y.reshape(x.shape) if size is None else y.flatten(-2)[..., : x.shape[-1]]

    return quantize


def fp8_static(scale: float) -> Quantize:
    return lambda x: e4m3(x / scale).float() * scale


def mx(size: int, largest: float) -> Quantize:
    """Dynamic MXFP8 (448) or MXFP4 (6)."""

    def quantize(x: torch.Tensor) -> torch.Tensor:
        grouped = blocks(x, size)
        scale = mx_scale(grouped.abs().amax(-1, keepdim=True), largest)
        y = e4m3(grouped / scale).float() if largest == 448 else from_e2m1(to_e2m1(grouped / scale))
        return (y * scale).flatten(-2)

    return quantize


def nvfp4(input_scale: float) -> Quantize:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        grouped = blocks(x, 16)
        scale = e4m3(grouped.abs().amax(-1, keepdim=True) / 6 / input_scale).float() * input_scale
        return (from_e2m1(to_e2m1(grouped / scale.clamp(min=1e-30))) * scale).flatten(-2)

    return quantize


@dataclass
class Stored:
    """A projection as a checkpoint stores it, and the float32 matrix that it stands for."""

    tensors: dict[str, torch.Tensor]
    matrix: torch.Tensor


def store_bf16(w: torch.Tensor) -> Stored:
    return Stored({"weight": w.bfloat16()}, w.bfloat16().float())


def store_nvfp4(w: torch.Tensor, style: str, global_scale: float, input_scale: float) -> Stored:
    """Style "modelopt": multipliers; "modelopt-a16": no input scale; "ct", "ct-a16": divisors."""
    grouped = blocks(w, 16)
    scale = e4m3(grouped.abs().amax(-1) / 6 / global_scale)
    code = to_e2m1(grouped / (scale.float() * global_scale).unsqueeze(-1)).flatten(-2)
    matrix = (from_e2m1(code).unflatten(-1, (-1, 16)) * scale.float().unsqueeze(-1)).flatten(-2) * global_scale
    if style.startswith("ct"):
        tensors = {
            "weight_packed": pack(code),
            "weight_scale": scale,
            "weight_global_scale": torch.tensor([1 / global_scale]),
            "input_global_scale": torch.tensor([1 / input_scale]),
        }
    else:
        tensors = {
            "weight": pack(code),
            "weight_scale": scale,
            "weight_scale_2": torch.tensor(global_scale),
            "input_scale": torch.tensor(input_scale),
        }
    return Stored({n: t for n, t in tensors.items() if not (style.endswith("a16") and n.startswith("input"))}, matrix)


def store_mx(w: torch.Tensor, largest: float, weight_name: str = "weight") -> Stored:
    grouped = blocks(w, 32)
    scale = mx_scale(grouped.abs().amax(-1), largest)
    encoded = (torch.log2(scale) + 127).to(torch.uint8)
    scaled = grouped / scale.unsqueeze(-1)
    if largest == 448:
        code = e4m3(scaled).flatten(-2)
        value, stored = code.float(), code
    else:
        code = to_e2m1(scaled).flatten(-2)
        value, stored = from_e2m1(code), pack(code)
    matrix = (value.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)
    return Stored({weight_name: stored, "weight_scale": encoded}, matrix)


def store_fp8_block(w: torch.Tensor) -> Stored:
    rows, k = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    padded = functional.pad(w, (0, k * 128 - w.shape[1], 0, rows * 128 - w.shape[0]))
    scale = padded.view(rows, 128, k, 128).abs().amax((1, 3)) / 448
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]]
    code = e4m3(w / full)
    return Stored({"weight": code, "weight_scale_inv": scale}, code.float() * full)


def store_fp8_tensor(w: torch.Tensor, input_scale: float | None) -> Stored:
    scale = w.abs().max() / 448
    code = e4m3(w / scale)
    tensors = {"weight": code, "weight_scale": scale}
    if input_scale is not None:
        tensors["input_scale"] = torch.tensor(input_scale)
    return Stored(tensors, code.float() * scale)


def store_fp8_channel(w: torch.Tensor) -> Stored:
    scale = w.abs().amax(1, keepdim=True) / 448
    code = e4m3(w / scale)
    return Stored({"weight": code, "weight_scale": scale}, code.float() * scale)


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    common = {"type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "format": form,
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {**common, **inputs},
    }
    return {"quant_method": "compressed-tensors", "format": form, "ignore": [], "config_groups": {"group_0": group}}


NVFP4_ARGUMENTS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MXFP4_ARGUMENTS = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP8_ARGUMENTS = {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
INPUT_SCALE = 0.01


def _modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class Recipe:
    """A format of experts: how vLLM is told, how a projection is stored, and what the first and second GEMM read.

    `store` gets the matrix and the index of the projection (gate 0, up 1, down 2) in the whole layer, so that scales
    can differ between all of them.
    """

    scheme: str
    quantization: dict[str, Any] | None
    store: Callable[[torch.Tensor, int], Stored]
    activation: Quantize = identity


def _global(index: int) -> float:
    return 0.004 * (1 + 0.37 * (index % 7))


RECIPES: dict[str, Recipe] = {
    "bf16": Recipe("bf16", None, lambda w, i: store_bf16(w)),
    "modelopt-nvfp4": Recipe(
        "nvfp4-w4a4",
        _modelopt("NVFP4") | {"group_size": 16},
        lambda w, i: store_nvfp4(w, "modelopt", _global(i), INPUT_SCALE),
        nvfp4(INPUT_SCALE),
    ),
    "modelopt-nvfp4-a16": Recipe(
        "nvfp4-w4a16",
        _modelopt("W4A16_NVFP4") | {"group_size": 16},
        lambda w, i: store_nvfp4(w, "modelopt-a16", _global(i), 0.0),
    ),
    "ct-nvfp4": Recipe(
        "nvfp4-w4a4",
        compressed("nvfp4-pack-quantized", NVFP4_ARGUMENTS, {**NVFP4_ARGUMENTS, "dynamic": "local"}),
        lambda w, i: store_nvfp4(w, "ct", _global(i), INPUT_SCALE),
        nvfp4(INPUT_SCALE),
    ),
    "ct-nvfp4-a16": Recipe(
        "nvfp4-w4a16",
        compressed("nvfp4-pack-quantized", NVFP4_ARGUMENTS, None),
        lambda w, i: store_nvfp4(w, "ct-a16", _global(i), 1.0),
    ),
    "ct-mxfp4-a16": Recipe(
        "mxfp4-w4a16",
        compressed("mxfp4-pack-quantized", MXFP4_ARGUMENTS, None),
        lambda w, i: store_mx(w, 6, "weight_packed"),
    ),
    "ct-mxfp4": Recipe(
        "mxfp4-w4a4",
        compressed("mxfp4-pack-quantized", MXFP4_ARGUMENTS, {**MXFP4_ARGUMENTS, "dynamic": True}),
        lambda w, i: store_mx(w, 6, "weight_packed"),
        mx(32, 6),
    ),
    "ct-mxfp4-a8": Recipe(
        "mxfp4-w4a8-fp8",
        compressed("mxfp4-pack-quantized", MXFP4_ARGUMENTS, {"num_bits": 8, "strategy": "token", "dynamic": True}),
        lambda w, i: store_mx(w, 6, "weight_packed"),
        fp8_by(-1),
    ),
    "ct-mxfp4-mxfp8": Recipe(
        "mxfp4-w4a8",
        compressed("mxfp4-pack-quantized", MXFP4_ARGUMENTS, {**MXFP8_ARGUMENTS, "dynamic": True}),
        lambda w, i: store_mx(w, 6, "weight_packed"),
        mx(32, 448),
    ),
    "fp8-block": Recipe(
        "fp8-block",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda w, i: store_fp8_block(w),
        fp8_by(128),
    ),
    "fp8-static": Recipe(
        "fp8-tensor",
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w, i: store_fp8_tensor(w, INPUT_SCALE),
        fp8_static(INPUT_SCALE),
    ),
    "fp8-dynamic": Recipe(
        "fp8-tensor",
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda w, i: store_fp8_tensor(w, None),
        fp8_by(None),
    ),
    "modelopt-fp8": Recipe(
        "fp8-tensor", _modelopt("FP8"), lambda w, i: store_fp8_tensor(w, INPUT_SCALE), fp8_static(INPUT_SCALE)
    ),
    "ct-fp8-channel": Recipe(
        "fp8-channel",
        compressed(
            "float-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "strategy": "token", "dynamic": True},
        ),
        lambda w, i: store_fp8_channel(w),
        fp8_by(-1),
    ),
    "modelopt-mxfp8": Recipe("mxfp8", _modelopt("MXFP8"), lambda w, i: store_mx(w, 448), mx(32, 448)),
    "ct-mxfp8": Recipe(
        "mxfp8",
        compressed("mxfp8-quantized", MXFP8_ARGUMENTS, {**MXFP8_ARGUMENTS, "dynamic": True}),
        lambda w, i: store_mx(w, 448),
        mx(32, 448),
    ),
}
GPT_OSS = Recipe("mxfp4-w4a16", {"quant_method": "mxfp4"}, lambda w, i: store_mx(w, 6))
GPT_OSS_SWIGLU = SwiGLU(1.702, 1.0, 7.0)


def activate(h: torch.Tensor, activation: Activation, *, interleaved: bool) -> torch.Tensor:
    functions = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: functional.relu(x).square(),
    }
    if not activation.gated:
        return functions[activation.function](h)
    gate, up = (h[..., 0::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.function == "swiglu":
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
    return functions[activation.function](gate) * up


@dataclass
class Sample:
    """A case, and the float32 matrices of its experts."""

    case: MoECase
    recipe: Recipe
    w13: list[torch.Tensor] = field(default_factory=list)
    w2: list[torch.Tensor] = field(default_factory=list)
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    def expected(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What the rank's experts contribute, in float32."""
        case, quantize = self.case, self.recipe.activation
        share = case.num_experts // case.ep_size
        local = range(case.ep_rank * share, (case.ep_rank + 1) * share)
        routes = [(t, j) for t in range(x.shape[0]) for j in range(ids.shape[1]) if int(ids[t, j]) in local]
        result = torch.zeros(x.shape, dtype=torch.float32)
        if not routes:
            return result
        rows = x
        if case.router_weight_on_input:
            rows = x * weights.to(x.dtype)
        first = quantize(rows.float())
        inner = []
        for t, j in routes:
            e = int(ids[t, j])
            h = self.w13[e] @ first[t]
            h = h if self.w13_bias is None else h + self.w13_bias[e].float()
            inner.append(activate(h, case.activation, interleaved=self.recipe is GPT_OSS))
        for (t, j), h in zip(routes, quantize(torch.stack(inner)), strict=True):
            e = int(ids[t, j])
            y = self.w2[e] @ h
            y = y if self.w2_bias is None else y + self.w2_bias[e].float()
            result[t] += y if case.router_weight_on_input else y * float(weights[t, j])
        return result


def sample(
    recipe: Recipe,
    *,
    num_experts: int = 4,
    top_k: int = 2,
    hidden: int = 128,
    intermediate: int = 128,
    activation: Activation = SILU,
    equal_shards: bool = False,
    biases: bool = False,
    **options: Any,
) -> Sample:
    """A checkpoint layer of random experts. With `equal_shards` gate and up have the same largest value."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    made = Sample(MoECase({}, num_experts, top_k, hidden, intermediate, None), recipe)
    names = ("gate_proj", "up_proj", "down_proj") if activation.gated else ("up_proj", "down_proj")
    added: list[list[torch.Tensor]] = []
    for expert in range(num_experts):
        matrices = []
        added.append([])
        for i, name in enumerate(names):
            shape = (hidden, intermediate) if name == "down_proj" else (intermediate, hidden)
            w = torch.randn(shape, generator=generator) * shape[1] ** -0.5 * (1 + 0.3 * i)
            if equal_shards and name != "down_proj":
                w = w / w.abs().max()
            stored = recipe.store(w, expert * len(names) + i)
            matrices.append(stored.matrix)
            tensors |= {f"{expert}.{name}.{key}": tensor for key, tensor in stored.tensors.items()}
            added[-1].append(torch.randn(shape[0], generator=generator).bfloat16())
            if biases:
                tensors[f"{expert}.{name}.bias"] = added[-1][-1]
        made.w13.append(torch.cat(matrices[:-1]))
        made.w2.append(matrices[-1])
    if biases:
        made.w13_bias = torch.stack([torch.cat(each[:-1]) for each in added])
        made.w2_bias = torch.stack([each[-1] for each in added])
    made.case = MoECase(
        tensors, num_experts, top_k, hidden, intermediate, recipe.quantization, activation=activation, **options
    )
    return made


def gpt_oss_sample(
    *, num_experts: int = 4, top_k: int = 2, hidden: int = 64, intermediate: int = 96, **options: Any
) -> Sample:
    """A checkpoint layer as gpt-oss stores it: experts stacked, rows of gate and up alternating, biases."""
    generator = torch.Generator().manual_seed(0)
    made = Sample(MoECase({}, num_experts, top_k, hidden, intermediate, None), GPT_OSS)
    fused: dict[str, torch.Tensor] = {}
    for name, rows, k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
        matrices = torch.randn(num_experts, rows, k, generator=generator) * 3 * k**-0.5
        stored = store_mx(matrices, 6)
        fused[f"{name}_blocks"] = stored.tensors["weight"].unflatten(-1, (k // 32, 16))
        fused[f"{name}_scales"] = stored.tensors["weight_scale"]
        fused[f"{name}_bias"] = torch.randn(num_experts, rows, generator=generator).bfloat16()
        (made.w13 if name == "gate_up_proj" else made.w2).extend(stored.matrix)
    made.w13_bias, made.w2_bias = fused["gate_up_proj_bias"], fused["down_proj_bias"]
    made.case = MoECase(
        fused, num_experts, top_k, hidden, intermediate, GPT_OSS.quantization, activation=GPT_OSS_SWIGLU, **options
    )
    return made


def routing(tokens: int, case: MoECase, *, ids_dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, ...]:
    """Tokens (M, H), weights and distinct global ids (M, top_k); the last route of the first token goes nowhere."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, case.hidden, generator=generator).to(case.dtype)
    weights = torch.rand(tokens, case.top_k, generator=generator)
    ids = torch.stack([torch.randperm(case.num_experts, generator=generator)[: case.top_k] for _ in range(tokens)])
    ids[0, -1] = -1
    return x, weights, ids.to(ids_dtype)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((y.float() - expected).norm() / expected.norm().clamp(min=1e-30))
