"""SGLang's quantized linear layers on `b12x_core.linear`: what --fp8-gemm-backend and --fp4-gemm-backend b12x select.

SGLang has no table of linear kernels. A layer asks the checkpoint's quantization configuration for a *method*, which
registers the parameters, processes what was loaded and computes; the hooks here put another method in the place of the
chosen one. `layer` is that method, `choice` knows which of SGLang's methods stand for which scheme.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from b12x_sglang.hooking import hook

_QUANTIZATION = "sglang.srt.layers.quantization"


@functools.cache
def register() -> None:
    """Put the op behind the two flags. Nothing changes where neither is b12x. Calls after the first do nothing."""
    from sglang.srt.layers import linear
    from sglang.srt.plugins.hook_registry import HookType

    from b12x_sglang.linear.layer import B12xLinearMethod

    # The one place that sees every configuration's choice for a linear layer, with the layer's name.
    hook("sglang.srt.layers.linear.LinearBase.__init__", _linear_layer, HookType.AFTER)
    # A vocabulary head registers its parameters in the breath in which it asks, so the answer itself must be ours.
    # Only these configurations, and the one below, quantize one.
    for config in ("ModelOptQuantConfig._get_quant_method", "ModelOptMixedPrecisionConfig.get_quant_method"):
        hook(f"{_QUANTIZATION}.modelopt_quant.{config}", _head, HookType.AFTER)
    # Around, since SGLang's own choice asks for the GPU and takes another scheme on some.
    hook(
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig.get_linear_scheme",
        _compressed_tensors_scheme,
        HookType.AROUND,
    )
    hook("sglang.srt.layers.logits_processor.should_apply_lm_head_quant_method", _head_is_quantized, HookType.AROUND)
    # SGLang knows by class name which methods register parameters that load themselves (its second loader).
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(B12xLinearMethod.__name__)


def _linear_layer(_: None, layer: Any, *arguments: Any, **keywords: Any) -> None:
    """After `LinearBase.__init__(layer, ..., prefix)`, which every kind of linear layer calls first."""
    from b12x_sglang.linear.choice import method_for

    prefix = keywords.get("prefix", arguments[5] if len(arguments) > 5 else "")
    layer.quant_method = method_for(layer.quant_method, prefix or type(layer).__name__)


def _head(method: Any, config: Any, layer: Any, prefix: str = "", **_: Any) -> Any:
    """After a configuration chose a method: only a vocabulary head is left to do here."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    from b12x_sglang.linear.choice import method_for

    return method_for(method, prefix or type(layer).__name__) if isinstance(layer, ParallelLMHead) else method


def _compressed_tensors_scheme(
    choose: Callable[..., Any],
    config: Any,
    layer: Any,
    layer_name: str | None = None,
    matched_target: str | None = None,
) -> Any:
    """Around the choice of a compressed-tensors scheme for a linear layer or a vocabulary head."""
    from b12x_sglang.linear.choice import compressed_tensors_scheme, left_to_engine

    name = layer_name or type(layer).__name__
    parts = config.get_scheme_dict(layer, layer_name, matched_target)
    ours = compressed_tensors_scheme(config, parts, name) if parts else None
    return left_to_engine(choose(config, layer, layer_name, matched_target), name) if ours is None else ours


def _head_is_quantized(decide: Callable[..., bool], lm_head: Any, quant_method: Any) -> bool:
    """Whether the logits come from the method of a head: not where a draft model was given the target's weight."""
    from b12x_sglang.linear.layer import holds_its_weight

    return decide(lm_head, quant_method) and holds_its_weight(lm_head)


__all__ = ["register"]
