"""SGLang's own MoE layer for a conformance case: its configuration, its weight loading, its forward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from b12x_core import ArgumentError
from b12x_core.adapters import MoECase, MoELayer

from b12x_sglang.hooks.context import layer_context
from b12x_sglang.hooks.linear import quantization_config

_PREFIX = "model.layers.0.mlp.experts"


def cannot_express(case: MoECase) -> str | None:
    """Why SGLang's MoE layer cannot express a case, None if it can."""
    activation = case.activation
    if activation.limit is not None and activation.function not in ("silu", "swiglu"):
        return f"SGLang clamps silu and swiglu only; got a limit with {activation.function}"
    if not case.is_gpt_oss and any(name.endswith(".bias") for name in case.tensors):
        return "SGLang loads biases of experts for gpt-oss checkpoints only"
    if (case.quantization or {}).get("weight_block_size") and case.intermediate % 128:
        return (
            "SGLang loads blocks of FP8 experts where the intermediate size is a multiple of 128; "
            f"got {case.intermediate}"
        )
    return None


def build(case: MoECase) -> MoELayer:
    """Build SGLang's MoE layer, load the case's tensors through SGLang's loaders, and return it.

    A rank of an expert-parallel layer is built in one process: SGLang loads the rank's experts and maps ids as in a
    group of that size, and the sum over ranks is left to the caller.
    """
    with layer_context(case.dtype, case.device, rank=case.ep_rank, ranks=case.ep_size), torch.no_grad():
        layer = _construct(case)
        _load(layer, case)
        layer.quant_method.process_weights_after_loading(layer)
        return Layer(case, layer)


class Layer:
    """SGLang's MoE layer, called as `b12x_core.adapters.MoELayer`."""

    def __init__(self, case: MoECase, layer: torch.nn.Module) -> None:
        from sglang.srt.runtime_context import get_context

        self._case = case
        self._context = get_context()
        self.layer = layer

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Run the layer's own forward pass with the routing given. x is copied: SGLang may overwrite it."""
        from sglang.srt.layers.moe.topk import StandardTopKOutput
        from sglang.srt.runtime_context import get_parallel, use_context

        logits = x.new_zeros(x.shape[0], self._case.num_experts, dtype=torch.float32)
        # The layer looks up a group of ranks, for memory that they may share, and goes on without: the sum over ranks
        # is left to its model.
        with use_context(self._context), get_parallel().override(tp_group=None), torch.no_grad():
            result: torch.Tensor = self.layer(x.clone(), StandardTopKOutput(topk_weights, topk_ids, logits))
        return result


def _construct(case: MoECase, **options: Any) -> Any:
    """The layer, not loaded yet; `options` are arguments of SGLang's `FusedMoE` that replace the ones chosen here."""
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class

    quant_config = quantization_config(case.quantization, {})
    activation = case.activation
    chosen: dict[str, Any] = {
        "num_experts": case.num_experts,
        "top_k": case.top_k,
        "hidden_size": case.hidden,
        "intermediate_size": case.intermediate,
        "layer_id": 0,
        "params_dtype": case.dtype,
        "quant_config": quant_config,
        "prefix": _PREFIX,
        "activation": activation.function,
        "is_gated": activation.gated,
        "swiglu_limit": activation.limit,
        "apply_router_weight_on_input": case.router_weight_on_input,
        "with_bias": case.is_gpt_oss,
    }
    if activation.function == "swiglu":
        # In SGLang it is silu with constants of its own.
        constants = {"alpha": activation.alpha, "beta": activation.beta, "clamp_limit": activation.limit}
        chosen |= {"activation": "silu", "swiglu_limit": None, "gate_up_interleaved": case.is_gpt_oss}
        chosen |= {f"gemm1_{name}": value for name, value in constants.items()}
    return get_moe_impl_class(quant_config)(**chosen | options)


def _load(layer: Any, case: MoECase) -> None:
    """Load the case's tensors as models do.

    Raises:
        ArgumentError: the layer has no place for a tensor.
    """
    if case.is_gpt_oss:
        _load_gpt_oss(layer, case)
        return
    # Models name the first projection w1 and, where there is a gate, the other one w3.
    names = ("gate_proj", "down_proj", "up_proj") if case.activation.gated else ("up_proj", "down_proj", "")
    mapping = layer.make_expert_params_mapping(*names, num_experts=case.num_experts)
    places = {weight: (target, expert, shard) for target, weight, expert, shard in mapping}
    parameters = {f"experts.{name}": parameter for name, parameter in layer.named_parameters()}
    blocks = "experts.w2_weight_scale_inv" in parameters
    for name, tensor in case.tensors.items():
        expert, projection, kind = name.split(".")
        if kind == "weight_scale" and blocks:
            kind = "weight_scale_inv"  # as SGLang's model loader renames it
        place = places.get(f"experts.{expert}.{projection}.")
        target = f"{place[0]}{kind}" if place is not None else ""
        if place is None or target not in parameters:
            raise ArgumentError(f"case.tensors: SGLang's layer has no place for {name}")
        parameter = parameters[target]
        parameter.weight_loader(parameter, tensor, target, shard_id=place[2], expert_id=place[1])


def _load_gpt_oss(layer: Any, case: MoECase) -> None:
    from sglang.srt.models.gpt_oss import GptOssForCausalLM

    class Model(torch.nn.Module):
        """What `GptOssForCausalLM` needs of itself to load experts."""

        load_experts = GptOssForCausalLM._load_mxfp4_experts_weights

        def __init__(self) -> None:
            super().__init__()
            self.experts = layer
            self.config = SimpleNamespace(num_local_experts=case.num_experts, intermediate_size=case.intermediate)

    loaded = Model().load_experts((f"experts.{name}", tensor) for name, tensor in case.tensors.items())
    if len(loaded) != len(case.tensors):
        raise ArgumentError("case.tensors: SGLang's layer has no place for some of them")
