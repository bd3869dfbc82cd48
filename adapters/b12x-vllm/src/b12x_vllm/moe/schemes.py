"""What vLLM says about an MoE layer, in the core's values: schemes and activations."""

from __future__ import annotations

import b12x_core
import torch
from b12x_core import SCHEMES, Activation, Scheme, SwiGLU
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

_SCHEMES_OF_KEYS: dict[tuple[QuantKey, QuantKey | None], str] = {
    (keys.kNvfp4Static, keys.kNvfp4Dynamic): "nvfp4-w4a4",
    (keys.kNvfp4Static, None): "nvfp4-w4a16",
    (keys.kMxfp4Static, keys.kMxfp8Dynamic): "mxfp4-w4a8",
    (keys.kMxfp4Static, None): "mxfp4-w4a16",
    (keys.kMxfp8Static, keys.kMxfp8Dynamic): "mxfp8",
    (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym): "fp8-block",
    (keys.kFp8Static128BlockE8M0Sym, keys.kFp8Dynamic128Sym): "fp8-block",
    (keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym): "fp8-channel",
    (keys.kFp8StaticTensorSym, keys.kFp8DynamicTokenSym): "fp8-tensor-token",
    (keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym): "fp8-tensor",
    (keys.kFp8StaticTensorSym, keys.kFp8DynamicTensorSym): "fp8-tensor",
    # vLLM's compressed-tensors method announces dynamic per-tensor activations with the key of groups of 128, and
    # then builds a quantization config without groups.
    (keys.kFp8StaticTensorSym, keys.kFp8Dynamic128Sym): "fp8-tensor",
}

_ACTIVATIONS = {
    MoEActivation.SILU: b12x_core.SILU,
    MoEActivation.GELU: b12x_core.GELU,
    MoEActivation.GELU_TANH: b12x_core.GELU_TANH,
    MoEActivation.RELU2: b12x_core.RELU2,
    MoEActivation.SILU_NO_MUL: b12x_core.SILU_NOT_GATED,
    MoEActivation.GELU_NO_MUL: b12x_core.GELU_NOT_GATED,
    MoEActivation.GELU_TANH_NO_MUL: b12x_core.GELU_TANH_NOT_GATED,
    MoEActivation.RELU2_NO_MUL: b12x_core.RELU2_NOT_GATED,
}
_SWIGLU = (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE)


def unquantized(dtype: torch.dtype) -> Scheme:
    """The scheme of 16-bit weights beside activations of a dtype."""
    return SCHEMES["fp16" if dtype == torch.float16 else "bf16"]


def of_keys(weight: QuantKey | None, activation: QuantKey | None, dtype: torch.dtype) -> Scheme | None:
    """The scheme that a pair of vLLM's quantization keys stands for, None if the core has none.

    Args:
        weight: key of the weights, None for 16-bit ones.
        activation: key of the activations, None for 16-bit ones.
        dtype: of the activations that enter the layer.
    """
    if weight is None:
        return unquantized(dtype) if activation is None else None
    name = _SCHEMES_OF_KEYS.get((weight, activation))
    return SCHEMES[name] if name is not None else None


def refuse_keys(weight: QuantKey | None, activation: QuantKey | None, intermediate: int) -> str:
    """Why `of_keys` has no scheme for a pair of keys, for experts with an intermediate size of their rank."""
    blocks = weight is not None and weight.scale.group_shape.row > 1
    if blocks and activation == keys.kFp8Dynamic128Sym and intermediate % 128:
        return (
            "b12x takes FP8 scales of 128 x 128 blocks, so a rank's intermediate size must be a multiple of 128; "
            f"got {intermediate}"
        )
    return f"b12x has no scheme for weights {weight} with activations {activation}"


def of_config(config: FusedMoEQuantConfig, dtype: torch.dtype) -> Scheme:
    """The scheme of a loaded layer.

    vLLM keeps the keys that `of_keys` reads only while it chooses a kernel; what stays with the layer is this config.

    Raises:
        UnsupportedError: the config describes what the core has no scheme for.
    """
    weight, activation = config.weight_quant_dtype, config.quant_dtype
    if weight is None:
        return unquantized(dtype)
    if isinstance(weight, str):
        name = {
            ("nvfp4", "nvfp4"): "nvfp4-w4a4",
            ("nvfp4", None): "nvfp4-w4a16",
            ("mxfp4", "mxfp8"): "mxfp4-w4a8",
            ("mxfp4", None): "mxfp4-w4a16",
            ("mxfp8", "mxfp8"): "mxfp8",
        }.get((weight, activation))
    elif config.block_shape is not None:
        name = "fp8-block" if config.block_shape == [128, 128] else None
    elif config.per_out_ch_quant:
        name = "fp8-channel"
    else:
        name = "fp8-tensor-token" if config.per_act_token_quant else "fp8-tensor"
    if name is None:
        raise b12x_core.UnsupportedError(
            f"b12x has no scheme for experts of {weight} weights with {activation} activations and blocks of "
            f"{config.block_shape}"
        )
    return SCHEMES[name]


def refuse_activation(activation: MoEActivation) -> str | None:
    """Why an activation is not served, None if it is."""
    if activation in _ACTIVATIONS or activation in _SWIGLU:
        return None
    names = ", ".join(sorted(known.value for known in (*_ACTIVATIONS, *_SWIGLU)))
    return f"b12x has no expert activation {activation.value}; it has {names}"


def interleaved(activation: MoEActivation) -> bool:
    """Whether the rows of w13 alternate between gate and up. In vLLM the activation's name says it."""
    return activation is MoEActivation.SWIGLUOAI


def activation_of(activation: MoEActivation, moe: FusedMoEConfig, config: FusedMoEQuantConfig) -> Activation:
    """The core's activation for a layer's, whose constants stand in either config, the quantization's first.

    As in vLLM, a limit clamps silu and the two swiglu forms and means nothing to the others, and swigluoai without
    constants has those of gpt-oss.
    """

    def constant(name: str) -> float | None:
        value: float | None = getattr(config, f"gemm1_{'clamp_limit' if name == 'limit' else name}")
        return value if value is not None else getattr(moe, f"swiglu_{name}")

    alpha, beta, limit = constant("alpha"), constant("beta"), constant("limit")
    if activation is MoEActivation.SILU and limit is not None:
        return Activation("silu", limit=limit)
    if activation is MoEActivation.SWIGLUOAI:
        return SwiGLU(1.702 if alpha is None else alpha, 1.0 if beta is None else beta, 7.0 if limit is None else limit)
    if activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        return SwiGLU(1.0 if alpha is None else alpha, 0.0 if beta is None else beta, limit)
    return _ACTIVATIONS[activation]
