"""b12x: quantized inference kernels for SM120 and SM121 GPUs, as torch custom ops.

The ops are pure functions on tensors; three frozen dataclasses hold prepared weights and what they were prepared for.
"""

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
from b12x_core.capabilities import Support, supports_attention, supports_linear, supports_moe
from b12x_core.environment import FORCE_A16
from b12x_core.errors import ArgumentError, B12xError, UnsupportedError
from b12x_core.formats import (
    BF16,
    FP8_BLOCK,
    FP8_GROUP,
    FP8_ROW,
    FP8_TENSOR,
    FP16,
    MXFP4,
    MXFP8,
    NVFP4,
    SCHEMES,
    Format,
    Scheme,
)
from b12x_core.ops.attention import paged_attention
from b12x_core.ops.kv_cache import write_kv_cache
from b12x_core.ops.linear import LinearWeights, linear, prepare_linear
from b12x_core.ops.moe import ExpertWeights, fused_moe, prepare_experts
from b12x_core.ops.quantize import quantize
from b12x_core.reference.quantize import QuantizedTensor

__version__ = "0.1.0"


def serving_scheme(scheme: Scheme) -> Scheme:
    """The scheme to serve a checkpoint's scheme with: itself, or with 16-bit activations if `B12X_FORCE_A16=1`."""
    return scheme.with_16_bit_activations() if FORCE_A16.enabled() else scheme


__all__ = [
    "BF16",
    "FP8_BLOCK",
    "FP8_GROUP",
    "FP8_ROW",
    "FP8_TENSOR",
    "FP16",
    "GELU",
    "GELU_NOT_GATED",
    "GELU_TANH",
    "GELU_TANH_NOT_GATED",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "RELU2",
    "RELU2_NOT_GATED",
    "SCHEMES",
    "SILU",
    "SILU_NOT_GATED",
    "Activation",
    "ArgumentError",
    "B12xError",
    "ExpertWeights",
    "Format",
    "LinearWeights",
    "QuantizedTensor",
    "Scheme",
    "Support",
    "SwiGLU",
    "UnsupportedError",
    "__version__",
    "fused_moe",
    "linear",
    "paged_attention",
    "prepare_experts",
    "prepare_linear",
    "quantize",
    "serving_scheme",
    "supports_attention",
    "supports_linear",
    "supports_moe",
    "write_kv_cache",
]
