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
from b12x_core.projections import (
    expert_scale_per_row,
    lost_block_scales,
    prepare_expert_projections,
    prepare_projections,
    scale_per_row,
    serving_scheme,
)
from b12x_core.reference.quantize import QuantizedTensor

__version__ = "0.1.0"


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
    "expert_scale_per_row",
    "fused_moe",
    "linear",
    "lost_block_scales",
    "paged_attention",
    "prepare_expert_projections",
    "prepare_experts",
    "prepare_linear",
    "prepare_projections",
    "quantize",
    "scale_per_row",
    "serving_scheme",
    "supports_attention",
    "supports_linear",
    "supports_moe",
    "write_kv_cache",
]
