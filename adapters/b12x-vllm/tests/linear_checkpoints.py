"""Linear layers in every kind of checkpoint that vLLM loads, each with the weight it stands for in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from b12x_core.adapters import LinearCase

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
QKV = (("q_proj", 256), ("k_proj", 128), ("v_proj", 128))
GATE_UP = (("gate_proj", 128), ("up_proj", 128))
ONE = (("o_proj", 192),)

Tensors = dict[str, torch.Tensor]
Projection = Callable[[int, int], tuple[Tensors, torch.Tensor]]


# What a projection of N rows and K columns has in a checkpoint, and the weight it stands for in float32. Codes and
# scales are drawn at random, every projection with scales of its own.


def _draw(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.5


def _e4m3(n: int, k: int) -> torch.Tensor:
    return (torch.randn(n, k) * 16).to(torch.float8_e4m3fn)


def _e8m0(n: int, k: int) -> torch.Tensor:
    return torch.randint(120, 125, (n, k), dtype=torch.uint8)


def _e2m1(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, E2M1[codes.long()]


def fp8_tensor(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    weight, scale = _e4m3(n, k), _draw(1) / 64
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale


def fp8_tensor_static(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = fp8_tensor(n, k)
    return {**tensors, "input_scale": torch.tensor([2.0**-8])}, dense


def fp8_channel(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    weight, scale = _e4m3(n, k), _draw(n, 1) / 64
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale


def fp8_channel_flat(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = fp8_channel(n, k)
    return {**tensors, "weight_scale": tensors["weight_scale"].flatten()}, dense


def fp8_channel_static(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = fp8_channel(n, k)
    return {**tensors, "input_scale": torch.tensor([2.0**-8])}, dense


def _block(n: int, k: int, name: str, e8m0: bool = False) -> tuple[Tensors, torch.Tensor]:
    weight, scale = _e4m3(n, k), _draw(-(-n // 128), -(-k // 128)) / 64
    scale = scale.to(torch.float8_e8m0fnu) if e8m0 else scale
    wide = scale.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return {"weight": weight, name: scale}, weight.float() * wide


def fp8_block(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    return _block(n, k, "weight_scale_inv")


def fp8_block_e8m0(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    return _block(n, k, "weight_scale_inv", e8m0=True)


def fp8_block_ct(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    return _block(n, k, "weight_scale")


def fp8_block_modelopt(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = _block(n, k, "weight_scale")
    return {**tensors, "weight_scale": tensors["weight_scale"][:, None, :, None]}, dense


def mxfp8(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    weight, scale = _e4m3(n, k), _e8m0(n, k // 32)
    return {"weight": weight, "weight_scale": scale}, weight.float() * _pow2(scale)


def _pow2(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


def mxfp4(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    (packed, values), scale = _e2m1(n, k), _e8m0(n, k // 32)
    return {"weight_packed": packed, "weight_scale": scale}, values * _pow2(scale)


def nvfp4(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    (packed, values), scale, scale_2 = _e2m1(n, k), _draw(n, k // 16).to(torch.float8_e4m3fn), _draw(1) / 64
    dense = values * scale.float().repeat_interleave(16, 1) * scale_2
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2}
    return {**tensors, "input_scale": torch.tensor([2.0**-6])}, dense


def nvfp4_a16(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = nvfp4(n, k)
    del tensors["input_scale"]
    return tensors, dense


def nvfp4_ct(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = nvfp4_ct_a16(n, k)
    return {**tensors, "input_global_scale": torch.tensor([2.0**6])}, dense


def nvfp4_ct_a16(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = nvfp4_a16(n, k)
    divisor = 1 / tensors.pop("weight_scale_2")
    return {"weight_packed": tensors.pop("weight"), **tensors, "weight_global_scale": divisor}, dense


def modelopt(algo: str) -> dict[str, Any]:
    group_size = {"group_size": 16} if "FP4" in algo else {}
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], **group_size}


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    defaults = {"type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**defaults, "dynamic": False, **weights}}
    if activations is not None:
        group["input_activations"] = {**defaults, **activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _fp8_compressed(weight: str, activation: dict[str, Any] | None) -> dict[str, Any]:
    block = {"block_structure": [128, 128]} if weight == "block" else {}
    activations = None if activation is None else {"num_bits": 8, **activation}
    return compressed("float-quantized", {"num_bits": 8, "strategy": weight, **block}, activations)


NVFP4_ARGS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MXFP4_ARGS = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP8_ARGS = {**MXFP4_ARGS, "num_bits": 8}
TOKEN = {"strategy": "token", "dynamic": True}
TENSOR = {"strategy": "tensor", "dynamic": False}
GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
FP8_BLOCK_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4_CT = compressed("nvfp4-pack-quantized", NVFP4_ARGS, {**NVFP4_ARGS, "dynamic": "local"})
NVFP4_CT_A16 = compressed("nvfp4-pack-quantized", NVFP4_ARGS, None)
MXFP4_CT = compressed("mxfp4-pack-quantized", MXFP4_ARGS, {**MXFP4_ARGS, "dynamic": True})
MXFP4_CT_A8 = compressed("mxfp4-pack-quantized", MXFP4_ARGS, {**MXFP8_ARGS, "dynamic": True})
MXFP4_CT_A8_TOKEN = compressed("mxfp4-pack-quantized", MXFP4_ARGS, {"num_bits": 8, **TOKEN})
MXFP4_CT_A16 = compressed("mxfp4-pack-quantized", MXFP4_ARGS, None)
MXFP8_CT = compressed("mxfp8-quantized", MXFP8_ARGS, {**MXFP8_ARGS, "dynamic": True})
MXFP8_CT_A16 = compressed("mxfp8-quantized", MXFP8_ARGS, None)


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint.

    Attributes:
        name: for test ids.
        config: its `quantization_config`.
        projection: makes the tensors of a projection.
        kernel: name of the class that serves it, without B12x.
        scheme: what a plain layer is served with, and a fused one too unless `fused_scheme` is given.
    """

    name: str
    config: dict[str, Any]
    projection: Projection
    kernel: str
    scheme: str
    fused_scheme: str | None = None

    def __str__(self) -> str:
        return self.name


# fmt: off
KINDS = (
    Kind("fp8-dynamic", {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor, "Fp8Linear",
         "fp8-tensor", "fp8-channel-tensor"),
    Kind("fp8-static", {"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor_static, "Fp8Linear",
         "fp8-tensor", "fp8-channel-tensor"),
    Kind("fp8-modelopt", modelopt("FP8"), fp8_tensor_static, "Fp8Linear", "fp8-tensor", "fp8-channel-tensor"),
    Kind("fp8-modelopt-channel", modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8_channel_flat, "Fp8Linear", "fp8-channel"),
    Kind("fp8-ct-tensor", _fp8_compressed("tensor", TOKEN), fp8_tensor, "Fp8Linear", "fp8-tensor-token", "fp8-channel"),
    Kind("fp8-ct-tensor-static", _fp8_compressed("tensor", TENSOR), fp8_tensor_static, "Fp8Linear",
         "fp8-tensor", "fp8-channel-tensor"),
    Kind("fp8-ct-channel", _fp8_compressed("channel", TOKEN), fp8_channel, "Fp8Linear", "fp8-channel"),
    Kind("fp8-ct-channel-static", _fp8_compressed("channel", TENSOR), fp8_channel_static, "Fp8Linear",
         "fp8-channel-tensor"),
    Kind("fp8-block", FP8_BLOCK_CONFIG, fp8_block, "Fp8BlockLinear", "fp8-block"),
    Kind("fp8-block-e8m0", FP8_BLOCK_CONFIG, fp8_block_e8m0, "Fp8BlockLinear", "fp8-block"),
    Kind("fp8-block-ct", _fp8_compressed("block", GROUP), fp8_block_ct, "Fp8BlockLinear", "fp8-block"),
    Kind("fp8-block-modelopt", modelopt("FP8_PB_WO"), fp8_block_modelopt, "Fp8BlockLinear", "fp8-block"),
    Kind("fp8-a16-tensor", _fp8_compressed("tensor", None), fp8_tensor, "Fp8W8A16Linear", "fp8-channel-w8a16"),
    Kind("fp8-a16-channel", _fp8_compressed("channel", None), fp8_channel, "Fp8W8A16Linear", "fp8-channel-w8a16"),
    Kind("mxfp8-modelopt", modelopt("MXFP8"), mxfp8, "MxFp8Linear", "mxfp8"),
    Kind("mxfp8-ct", MXFP8_CT, mxfp8, "MxFp8Linear", "mxfp8"),
    Kind("mxfp8-a16-ct", MXFP8_CT_A16, mxfp8, "MxFp8Linear", "mxfp8-w8a16"),
    Kind("nvfp4-modelopt", modelopt("NVFP4"), nvfp4, "NvFp4Linear", "nvfp4-w4a4"),
    Kind("nvfp4-a16-modelopt", modelopt("W4A16_NVFP4"), nvfp4_a16, "NvFp4W4A16Linear", "nvfp4-w4a16"),
    Kind("nvfp4-ct", NVFP4_CT, nvfp4_ct, "NvFp4Linear", "nvfp4-w4a4"),
    Kind("nvfp4-a16-ct", NVFP4_CT_A16, nvfp4_ct_a16, "NvFp4W4A16Linear", "nvfp4-w4a16"),
    Kind("mxfp4-ct", MXFP4_CT, mxfp4, "MxFp4Linear", "mxfp4-w4a4"),
    Kind("mxfp4-a8-ct", MXFP4_CT_A8, mxfp4, "MxFp4Linear", "mxfp4-w4a8"),
    Kind("mxfp4-a8-token-ct", MXFP4_CT_A8_TOKEN, mxfp4, "MxFp4Linear", "mxfp4-w4a8-fp8"),
    Kind("mxfp4-a16-ct", MXFP4_CT_A16, mxfp4, "MxFp4Linear", "mxfp4-w4a16"),
)
# fmt: on
BY_NAME = {kind.name: kind for kind in KINDS}


def make(
    kind: Kind, shards: tuple[tuple[str, int], ...], k: int = 256, dtype: torch.dtype = torch.bfloat16
) -> tuple[LinearCase, torch.Tensor]:
    """A layer of a kind, and its weight in float32."""
    tensors, dense = {}, []
    for name, rows in shards:
        stored, weight = kind.projection(rows, k)
        tensors |= {f"{name}.{tensor}": value for tensor, value in stored.items()}
        dense.append(weight)
    return LinearCase(shards, k, tensors, kind.config, dtype=dtype, head_size=64), torch.cat(dense)


def activations(kind: Kind, tokens: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers that the kind's activation format holds exactly, so that quantizing them changes nothing."""
    if "fp4" in kind.scheme and "a8" not in kind.scheme:
        grid, block, unit = E2M1[:8], 16, 2.0**-6
    else:
        grid, block, unit = torch.tensor([0, 1, 1.5, 2, 3, 5, 8, 64, 112, 208, 448]), 32, 2.0**-8
    x = grid[torch.randint(0, len(grid), (tokens, k))] * (torch.randint(0, 2, (tokens, k)) * 2 - 1)
    x[:, ::block] = grid[-1]
    return (x * unit).to(dtype)
