"""What is true, written down a second time: expected results that share no code with the core.

`codecs` and `quantize` define the formats on numpy and `ml_dtypes`; `linear`, `moe` and `attention` compute what a
layer must return, in float64.
"""

from b12x_conformance.oracle.quantize import (
    ACTIVATION_RULES,
    WEIGHT_FORMATS,
    Quantized,
    dequantize,
    fake_quantize_activation,
    quantize_weight,
)

__all__ = [
    "ACTIVATION_RULES",
    "WEIGHT_FORMATS",
    "Quantized",
    "dequantize",
    "fake_quantize_activation",
    "quantize_weight",
]
