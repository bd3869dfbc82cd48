"""What vLLM's loading code loses of a checkpoint before a kernel sees it, kept for the kernels here.

Scales of fused projections. A layer that fuses q, k and v (or gate and up) loads one scale a projection. vLLM then
reduces the global scales of NVFP4 to their maximum, which multiplies the other projections by a wrong number, and
quantizes FP8 weights again to the largest of their scales, which rounds them twice. No kernel sees the scales of the
projections, and the only place before the reduction is the quantization method's `process_weights_after_loading`; it
is wrapped to leave them on the layer.

Activations of compressed-tensors microscaling checkpoints. vLLM asks for quantized activations whatever
`input_activations` says; it is read again where the scheme of a layer is chosen.

Both act only where the kernel is one of ours, or the flag asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from b12x_core import UnsupportedError, compressed_tensors
from compressed_tensors.quantization import QuantizationArgs
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW4A4Mxfp4,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Mxfp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptLinearMethod
from vllm.model_executor.parameter import PerTensorScaleParameter
from vllm.model_executor.utils import is_weights_pre_processed

from b12x_vllm.linear.kernels import PROJECTION_SCALES, B12xMxFp4Linear, B12xMxFp8Linear, LinearKernel

Reduce = Callable[[torch.Tensor], torch.Tensor]


def install(requested: Callable[[str], bool]) -> None:
    """Wrap vLLM's loading code. To be called once.

    Args:
        requested: whether the configuration asks for our kernels, by key of vLLM's `linear_backend_per_quant`.
    """
    # A scalar tells vLLM's Fp8 and compressed-tensors code that an FP8 weight has one scale already; ModelOpt's code
    # and the NVFP4 code want one value a projection, and leave the weight alone if they are equal.
    for method, kernel, reduced in (
        (Fp8LinearMethod, "fp8_linear", torch.max),
        (CompressedTensorsW8A8Fp8, "fp8_linear", torch.max),
        (ModelOptLinearMethod, "kernel", _all_largest),
        (CompressedTensorsW4A4Fp4, "kernel", _all_largest),
    ):
        _keep_scales(method, kernel, reduced)
    _honour_input_activations(requested)


def _all_largest(scales: torch.Tensor) -> torch.Tensor:
    return scales.max().expand_as(scales).clone()


def _keep_scales(method: Any, kernel: str, reduced: Reduce) -> None:
    """Wrap a quantization method to leave a fused layer's scales, as multipliers, under `PROJECTION_SCALES`.

    Args:
        method: class whose `process_weights_after_loading` reduces them.
        kernel: its attribute that holds the layer's kernel.
        reduced: scales of the projections -> what the method then finds in their place.
    """
    process = method.process_weights_after_loading

    @functools.wraps(process)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        if isinstance(getattr(self, kernel, None), LinearKernel):
            if is_weights_pre_processed():
                raise UnsupportedError("b12x prepares weights that are loaded, which --load-format ipc_cache skips")
            # compressed-tensors stores NVFP4's scales as divisors
            for name, divisor in (("weight_scale", False), ("weight_scale_2", False), ("weight_global_scale", True)):
                scales = getattr(layer, name, None)
                if isinstance(scales, PerTensorScaleParameter):
                    if scales.numel() > 1:
                        setattr(layer, PROJECTION_SCALES, scales.data.reciprocal() if divisor else scales.data)
                    scales.data = reduced(scales.data)
            if isinstance(divisors := getattr(layer, "input_global_scale", None), PerTensorScaleParameter):
                # All projections share one activation: the widest range of them holds it, the smallest divisor.
                divisors.data.fill_(divisors.data.min())
        process(self, layer)

    method.process_weights_after_loading = process_weights_after_loading


class _W8A16Mxfp8(CompressedTensorsW8A8Mxfp8):
    """MXFP8 weights beside 16-bit activations, for which vLLM has no scheme."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        if isinstance(self.kernel, B12xMxFp8Linear):
            self.kernel.weight_only = True


def _honour_input_activations(requested: Callable[[str], bool]) -> None:
    """Wrap the choice of a compressed-tensors scheme."""
    choose = CompressedTensorsConfig._get_scheme_from_parts

    @functools.wraps(choose)
    def _get_scheme_from_parts(
        self: Any, weight_quant: QuantizationArgs, input_quant: QuantizationArgs | None, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_mxfp4(weight_quant) and requested("mxfp4"):
            scheme = compressed_tensors.scheme(weight_quant, input_quant)
            if scheme is None:
                raise UnsupportedError(f"b12x has no scheme for MXFP4 weights with activations {input_quant}")
            [key] = (key for key, form in B12xMxFp4Linear.activations.items() if form == scheme.activation)
            return CompressedTensorsW4A4Mxfp4(activation_quant_key=key)
        if self._is_mxfp8(weight_quant) and input_quant is None and requested("mxfp8"):
            return _W8A16Mxfp8()
        return choose(self, weight_quant, input_quant, *args, **kwargs)

    CompressedTensorsConfig._get_scheme_from_parts = _get_scheme_from_parts
