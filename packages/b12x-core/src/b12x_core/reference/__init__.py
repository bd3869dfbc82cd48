"""Every op in plain torch: what is true, and what runs on a CPU.

Inputs are dequantized to float32 and multiplied in float32. Where a scheme quantizes activations, they are quantized
by the rule of `b12x_core.reference.quantize`. Nothing here checks arguments; `b12x_core.ops` does.
"""
