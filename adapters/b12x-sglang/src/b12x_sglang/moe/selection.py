"""What makes SGLang give its MoE layers our quantization method, each hook for requests of b12x alone.

SGLang chooses the method of a layer in the constructor of `FusedMoE`, asking the quantization config or, without one,
by itself; a method that is given to the constructor has precedence. So that is what happens here, and the choice is
made by the given method, once the layer knows itself (`B12xMoEMethod.create_weights`). Hooks of the configs would have
to be one for each, and would not see unquantized layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from b12x_sglang.flags import moe_requested
from b12x_sglang.hooking import hook

_LAYERS = "sglang.srt.layers"


def register() -> None:
    """Register the hooks with SGLang, which applies them after all plug-ins are loaded."""
    for target, function in (
        (f"{_LAYERS}.moe.fused_moe_triton.layer.FusedMoE.__init__", _construct_layer),
        (f"{_LAYERS}.quantization.modelopt_quant.ModelOptNvFp4FusedMoEMethod.__init__", _construct_nvfp4),
        (
            f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig.get_moe_scheme",
            _compressed_scheme,
        ),
    ):
        hook(target, function, HookType.AROUND)


def _construct_layer(construct: Callable[..., None], layer: Any, *arguments: Any, **named: Any) -> None:
    """Construct a layer with our method, which gets the one that the layer would have had."""
    if not moe_requested():
        return construct(layer, *arguments, **named)
    from b12x_sglang.moe.method import B12xMoEMethod

    bound = inspect.signature(construct).bind(layer, *arguments, **named)
    bound.arguments["quant_method"] = B12xMoEMethod(
        bound.arguments.get("quant_method"), bound.arguments.get("quant_config"), bound.arguments.get("prefix", "")
    )
    return construct(*bound.args, **bound.kwargs)


def _construct_nvfp4(construct: Callable[..., None], method: Any, quant_config: Any) -> None:
    """Construct SGLang's method for ModelOpt's NVFP4 experts on any GPU: it refuses all but Blackwell.

    Only its parameters and their loading are used, so it gets what these ask for.
    """
    if not moe_requested():
        return construct(method, quant_config)
    method.quant_config = quant_config
    method.enable_flashinfer_trtllm_moe = method.use_flashinfer_trtllm_weight_layout = False
    return None


def _compressed_scheme(choose: Callable[..., Any], config: Any, layer: Any, layer_name: str | None = None) -> Any:
    """Choose a scheme for compressed-tensors experts; for NVFP4 ones the scheme that creates parameters anywhere.

    The scheme that SGLang has for W4A4 on Blackwell loads up before gate, and knows gated experts only. The one it has
    for other GPUs creates the same parameters, those of activations included, and would drop the latter only when it
    processes them, which is not its part here.
    """
    if moe_requested():
        from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A16Nvfp4MoE

        config._add_fused_moe_to_target_scheme_map()
        projections = [
            config.get_scheme_dict(layer, f"{layer_name}.0.{name}") for name in ("gate_proj", "up_proj", "down_proj")
        ]
        first = projections[0]
        uniform = first is not None and all(other == first for other in projections)
        if uniform and config._is_fp4a4_nvfp4(first["weights"], first["input_activations"]):
            return CompressedTensorsW4A16Nvfp4MoE(has_input_global_scale=True)
    return choose(config, layer, layer_name)
