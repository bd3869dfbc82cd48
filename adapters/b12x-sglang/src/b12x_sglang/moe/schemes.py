"""What SGLang says about an MoE layer, in the core's values: schemes, activations, and reasons to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import b12x_core
import torch
from b12x_core import SCHEMES, Activation, Scheme, SwiGLU
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsFusedMoEMethod,
)
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8MoEMethod, ModelOptNvFp4FusedMoEMethod
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8FP8MoEMethod
from sglang.srt.runtime_context import get_exec, get_parallel

from b12x_sglang.compressed import declared

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2")
"""Functions of `MoeRunnerConfig.activation` that the core has too."""

Answer = Scheme | str
"""The scheme of a layer, or one reason why it is not served."""


def _unquantized(layer: Any, method: Any, prefix: str) -> Answer:
    return SCHEMES["fp16" if layer.params_dtype == torch.float16 else "bf16"]


def _fp8(layer: Any, method: Any, prefix: str) -> Answer:
    config = method.quant_config
    if method.is_fp4_expert:
        return "b12x has no scheme for MXFP4 experts with activations in FP8 groups of 128"
    if not config.is_checkpoint_fp8_serialized:
        return "b12x serves FP8 experts as a checkpoint stores them, and SGLang would quantize these while loading"
    if method.use_mxfp8:
        return SCHEMES["mxfp8"]
    if not method.block_quant:
        return SCHEMES["fp8-tensor"]
    if list(method.weight_block_size) != [128, 128]:
        return f"b12x takes FP8 scales of 128 x 128 blocks; got {method.weight_block_size}"
    return SCHEMES["fp8-block"]


def _modelopt_fp8(layer: Any, method: Any, prefix: str) -> Answer:
    return SCHEMES["fp8-tensor"]


def _modelopt_nvfp4(layer: Any, method: Any, prefix: str) -> Answer:
    config = method.quant_config
    if not config.is_checkpoint_nvfp4_serialized:
        return "b12x serves NVFP4 experts as a checkpoint stores them, and SGLang would quantize these while loading"
    if config.group_size != 16:
        return f"b12x takes NVFP4 scales of 16 elements; got {config.group_size}"
    if config.is_awq:
        return "b12x has no scales of single channels, which NVFP4_AWQ checkpoints may have"
    # A checkpoint of mixed precision says it per layer, by which of its configs it gives to the method.
    if config.is_w4a16 or config is getattr(layer.quant_config, "nvfp4a16_config", None):
        return SCHEMES["nvfp4-w4a16"]
    if config.use_per_token_activation:
        return "b12x quantizes activations with the checkpoint's scales, and SGLang was told to take one of each token"
    return SCHEMES["nvfp4-w4a4"]


def _mxfp4(layer: Any, method: Any, prefix: str) -> Answer:
    if isinstance(layer.quant_config, CompressedTensorsConfig):
        return _compressed(layer, method, prefix)
    return SCHEMES["mxfp4-w4a16"]


def _w8a8_fp8(layer: Any, method: Any, prefix: str) -> Answer:
    return SCHEMES["fp8-channel"]


def _compressed(layer: Any, method: Any, prefix: str) -> Answer:
    config = layer.quant_config
    if not isinstance(config, CompressedTensorsConfig):
        return f"b12x does not know the parameters of SGLang's {type(layer.scheme).__name__}"
    config._add_fused_moe_to_target_scheme_map()
    arguments = config.get_scheme_dict(layer, f"{prefix}.0.gate_proj")
    if arguments is None:
        return "SGLang takes these experts for MXFP4, and the checkpoint lists them among those left unquantized"
    scheme, group = declared(config, arguments)
    return scheme or f"b12x has no scheme for experts with {group}"


_SCHEMES_OF_METHODS: dict[type[FusedMoEMethodBase], Callable[[Any, Any, str], Answer]] = {
    UnquantizedFusedMoEMethod: _unquantized,
    Fp8MoEMethod: _fp8,
    W8A8FP8MoEMethod: _w8a8_fp8,
    ModelOptFp8MoEMethod: _modelopt_fp8,
    ModelOptNvFp4FusedMoEMethod: _modelopt_nvfp4,
    Mxfp4MoEMethod: _mxfp4,
    CompressedTensorsFusedMoEMethod: _compressed,
}
"""SGLang's own methods whose parameters are understood. A class derived from one may have others."""


def scheme_of(layer: Any, method: FusedMoEMethodBase, prefix: str) -> Answer:
    """The scheme of the checkpoint of a layer, or why there is none.

    Args:
        layer: SGLang's `FusedMoE`.
        method: SGLang's own quantization method for it.
        prefix: name of the layer.
    """
    read = _SCHEMES_OF_METHODS.get(type(method))
    if read is None:
        return f"b12x does not know the parameters of SGLang's {type(method).__name__}"
    return read(layer, method, prefix)


def interleaved(config: MoeRunnerConfig) -> bool:
    """Whether the rows of gate and up alternate. SGLang reads its own field for this activation only."""
    return bool(config.is_gated and config.gemm1_alpha is not None and config.gate_up_interleaved)


def activation_of(config: MoeRunnerConfig) -> Activation | str:
    """The core's activation for a layer's, or why there is none.

    A gemm1_alpha makes silu the function of gpt-oss, whose beta is 1 unless said otherwise. Without it, swiglu_limit
    clamps the projections before silu, and gemm1_clamp_limit the result of silu.
    """
    if config.activation not in FUNCTIONS:
        return f"b12x has no expert activation {config.activation}; it has {', '.join(FUNCTIONS)}"
    if config.activation == "silu" and config.is_gated:
        if config.gemm1_alpha is not None:
            beta = 1.0 if config.gemm1_beta is None else config.gemm1_beta
            return SwiGLU(config.gemm1_alpha, beta, config.gemm1_clamp_limit)
        if config.gemm1_clamp_limit is not None:
            return f"b12x clamps a gate before silu; got gemm1_clamp_limit={config.gemm1_clamp_limit}, a clamp after it"
        return Activation("silu", limit=config.swiglu_limit)
    constants = {name: getattr(config, name) for name in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")}
    given = ", ".join(f"{name}={value}" for name, value in constants.items() if value is not None)
    if given:
        return f"b12x has constants of gated silu only; got {given} with {config.activation}, gated={config.is_gated}"
    return Activation(config.activation, gated=config.is_gated)


def refuse(layer: Any, scheme: Scheme, intermediate: int) -> str | None:
    """Why a layer is not served in a scheme, None if it is.

    Args:
        layer: SGLang's `FusedMoE`, without its parameters.
        scheme: what it is served in.
        intermediate: I of this rank.
    """
    config = layer.moe_runner_config
    if layer.params_dtype not in (torch.bfloat16, torch.float16):
        return f"b12x takes bfloat16 or float16 tokens; got {layer.params_dtype}"
    if not get_moe_a2a_backend().is_none():
        return f"b12x takes tokens from SGLang's standard dispatcher; got the a2a backend {get_moe_a2a_backend().value}"
    if get_exec().moe.enable_eplb:
        return "b12x prepares experts once, and expert load balancing (EPLB) moves them between ranks afterwards"
    if get_parallel().dwdp_size > 1:
        return "b12x prepares experts once, and DWDP replaces them afterwards"
    if config.no_combine:
        return "b12x adds up the experts of a token, and this layer wants them one by one (no_combine)"
    activation = activation_of(config)
    if isinstance(activation, str):
        return activation
    if scheme.weight == b12x_core.FP8_BLOCK and intermediate % 128:
        return f"SGLang loads FP8 blocks for intermediate sizes that are multiples of 128 a rank; got {intermediate}"
    device = torch.empty(0).device
    return b12x_core.supports_moe(
        scheme, layer.num_local_experts, layer.hidden_size, intermediate, activation, device
    ).reason
