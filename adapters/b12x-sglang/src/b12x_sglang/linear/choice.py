"""Which of SGLang's methods stand for which scheme of the core, and whether a flag asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from b12x_core import (
    BF16,
    FP8_BLOCK,
    FP8_GROUP,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    Scheme,
    UnsupportedError,
)
from b12x_core.formats import Element
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW4A16Fp4,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A16Fp8,
)
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.modelopt_quant import (
    ModelOptFp4LinearMethod,
    ModelOptFp8LinearMethod,
    ModelOptNvFp4A16LinearMethod,
)
from sglang.srt.layers.quantization.quark.quark import QuarkLinearMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod

from b12x_sglang.compressed import declared
from b12x_sglang.flags import fp4_requested, fp8_requested
from b12x_sglang.linear.layer import B12xCompressedTensorsScheme, B12xLinearMethod, Stored
from b12x_sglang.linear.microscaled import MicroscaledParameters

_WHILE_LOADING = "quantizes 16-bit weights while loading, and b12x serves checkpoints that are quantized"


def _fp8(method: Any) -> Stored:
    """Fp8Config and those that reuse its method: MXFP8, blocks of 128 x 128, one scale a tensor."""
    config = method.quant_config
    if not method.is_checkpoint_fp8_serialized:
        raise UnsupportedError(_WHILE_LOADING)
    if method.use_mxfp8:
        return Stored(Scheme(MXFP8, MXFP8), scale="weight_scale_inv")
    block = config.weight_block_size
    if block is not None:
        if list(block) != [128, 128]:
            raise UnsupportedError(f"has FP8 blocks of {block}, and b12x serves blocks of [128, 128]")
        return Stored(Scheme(FP8_BLOCK, FP8_GROUP), scale="weight_scale_inv")
    schemes = (getattr(config, name, None) for name in ("activation_scheme", "linear_activation_scheme"))
    if "static" in schemes:
        return Stored(Scheme(FP8_TENSOR, FP8_TENSOR), input_scale="input_scale")
    # The checkpoint leaves open what shares a dynamic scale; SGLang gives each token its own.
    return Stored(Scheme(FP8_TENSOR, FP8_ROW))


def _fp8_modelopt(method: Any) -> Stored:
    if not method.quant_config.is_checkpoint_fp8_serialized:
        raise UnsupportedError(_WHILE_LOADING)
    return Stored(Scheme(FP8_TENSOR, FP8_TENSOR), input_scale="input_scale")


def _fp8_channel(method: Any) -> Stored:
    if not method.quantization_config.is_checkpoint_fp8_serialized:
        raise UnsupportedError(_WHILE_LOADING)
    return Stored(Scheme(FP8_ROW, FP8_ROW))


def _nvfp4(method: Any) -> Stored:
    _groups_of_16(method)
    pre_scale = "pre_quant_scale" if method.quant_config.is_awq else None
    return Stored(Scheme(NVFP4, NVFP4), global_scale="weight_scale_2", input_scale="input_scale", pre_scale=pre_scale)


def _nvfp4_w4a16(method: Any) -> Stored:
    _groups_of_16(method)
    return Stored(Scheme(NVFP4, BF16), global_scale="weight_scale_2")


def _groups_of_16(method: Any) -> None:
    if method.quant_config.group_size != 16:
        raise UnsupportedError(f"has a scale for {method.quant_config.group_size} FP4 values, and NVFP4 has one for 16")


METHODS: Mapping[type, tuple[Callable[[], bool], Callable[[Any], Stored]]] = {
    Fp8LinearMethod: (fp8_requested, _fp8),
    ModelOptFp8LinearMethod: (fp8_requested, _fp8_modelopt),
    W8A8Fp8LinearMethod: (fp8_requested, _fp8_channel),
    ModelOptFp4LinearMethod: (fp4_requested, _nvfp4),
    ModelOptNvFp4A16LinearMethod: (fp4_requested, _nvfp4_w4a16),
}
"""SGLang's methods: whether a flag asks for b12x in their place, and what they make of a layer's parameters."""

_SCHEMES: Mapping[type, Callable[[], bool]] = {
    CompressedTensorsW8A8Fp8: fp8_requested,
    CompressedTensorsW8A16Fp8: fp8_requested,
    CompressedTensorsW4A4Fp4: fp4_requested,
    CompressedTensorsW4A16Fp4: fp4_requested,
}
"""SGLang's compressed-tensors schemes that the flags are about."""


def method_for(method: Any, name: str) -> Any:
    """The method that serves a layer: b12x's in the place of one that a flag is about, else the given one.

    Args:
        method: SGLang's choice.
        name: the layer's.

    Raises:
        UnsupportedError: a flag asks for b12x, which does not serve the layer. The sentence names it.
    """
    if isinstance(method, QuarkLinearMethod) and (fp8_requested() or fp4_requested()):
        raise UnsupportedError(f"{name}: b12x serves no layers of Quark checkpoints")
    for base, (requested, stored) in METHODS.items():
        if isinstance(method, base) and requested():
            if type(method) is not base:
                raise UnsupportedError(f"{name}: b12x does not know SGLang's {type(method).__name__}")
            try:
                return B12xLinearMethod(method, stored(method), name)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name}: {error}") from error
    return method


def compressed_tensors_scheme(config: Any, parts: Mapping[str, Any], name: str) -> B12xCompressedTensorsScheme | None:
    """The scheme that serves a compressed-tensors layer, None where it is left to SGLang.

    Args:
        config: SGLang's `CompressedTensorsConfig`.
        parts: the layer's group of it: "weights" and "input_activations".
        name: the layer's.

    Raises:
        UnsupportedError: a flag asks for b12x, which does not serve the layer. The sentence names it.
    """
    weights, inputs = parts.get("weights"), parts.get("input_activations")
    scheme = None if weights is None else declared(config, parts)[0]
    if scheme is None or scheme.weight not in (FP8_TENSOR, FP8_ROW, FP8_BLOCK, NVFP4, MXFP4, MXFP8):
        return None
    fp4 = scheme.weight.element is Element.E2M1
    if not (fp4_requested() if fp4 else fp8_requested()):
        return None
    if config.sparsity_scheme_map:
        raise UnsupportedError(f"{name}: b12x serves no weights with a sparsity_config")
    own: Any
    if scheme.weight in (MXFP4, MXFP8):
        own = MicroscaledParameters(scheme.weight)
        stored = Stored(scheme, weight=own.weight_name)
    elif fp4:
        own = CompressedTensorsW4A4Fp4() if scheme.static_activation_scale else CompressedTensorsW4A16Fp4()
        stored = Stored(
            scheme,
            weight="weight_packed",
            global_scale="weight_global_scale",
            input_scale="input_global_scale" if scheme.static_activation_scale else None,
            divisors=True,
        )
    else:
        static = inputs is not None and not inputs.dynamic
        own = CompressedTensorsW8A8Fp8(weights, is_static_input_scheme=static)
        stored = Stored(scheme, input_scale="input_scale" if static else None)
    return B12xCompressedTensorsScheme(own, stored, name)


def left_to_engine(scheme: Any, name: str) -> Any:
    """SGLang's compressed-tensors scheme for a layer, given that b12x has none.

    Raises:
        UnsupportedError: a flag asks for b12x. The sentence names the layer.
    """
    for base, requested in _SCHEMES.items():
        if isinstance(scheme, base) and requested():
            raise UnsupportedError(f"{name}: b12x has no scheme for what SGLang serves as {base.__name__}")
    return scheme
