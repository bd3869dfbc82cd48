"""vLLM's own MoE layer for a conformance case: its configuration, its weight loading, its forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from b12x_core import Activation, ArgumentError, SwiGLU
from b12x_core.adapters import MoECase, MoELayer

from b12x_vllm.hooks.context import forward_context, layer_context
from b12x_vllm.hooks.linear import quantization_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PREFIX = "model.layers.0.mlp.experts"
_GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def cannot_express(case: MoECase) -> str | None:
    """Why vLLM's MoE layer cannot express a case, None if it can."""
    activation = case.activation
    if case.router_weight_on_input and case.top_k != 1:
        return f"vLLM applies router weights to the input for top_k 1 only; got {case.top_k}"
    if activation.limit is not None and activation.function not in ("silu", "swiglu"):
        return f"vLLM clamps silu and swiglu only; got a limit with {activation.function}"
    if case.is_gpt_oss:
        if activation != _GPT_OSS:
            return f"vLLM gives gpt-oss experts {_GPT_OSS}; got {activation}"
        if case.dtype != torch.bfloat16:
            return f"vLLM serves gpt-oss in bfloat16 only; got {case.dtype}"
    elif any(name.endswith(".bias") for name in case.tensors):
        method = (case.quantization or {}).get("quant_method", "fp8")
        if method != "fp8":
            return f"vLLM loads biases of experts for unquantized, fp8 and gpt-oss checkpoints only; got {method}"
    if (case.quantization or {}).get("weight_block_size") and case.intermediate % 128:
        return (
            "vLLM hands on the blocks of FP8 experts as they are where the intermediate size is a multiple of 128; "
            f"got {case.intermediate}"
        )
    return None


def build(case: MoECase) -> MoELayer:
    """Build vLLM's MoE layer, load the case's tensors through vLLM's loaders, and return it with the routing open.

    A rank of an expert-parallel layer is built in one process: vLLM computes the map and loads the rank's experts as
    in a group of that size, and the sum over ranks is left to the caller.
    """
    # What the layers look up about the model that they belong to.
    hf_config = SimpleNamespace()
    model = SimpleNamespace(dtype=case.dtype, hf_config=hf_config, hf_text_config=hf_config, quantization_config=None)
    with layer_context(case.dtype, case.device) as vllm_config, _replaced(vllm_config, "model_config", model):
        routing = _Routing()
        layer = _construct(case, vllm_config, routing)
        _load(layer, case)
        layer.routed_experts.quant_method.process_weights_after_loading(layer.routed_experts)
    return Layer(case, vllm_config, layer, routing)


class _Routing:
    """A routing function, as models may give to vLLM's router, that returns what it was last told."""

    def __init__(self) -> None:
        self.weights = torch.empty(0, 0)
        self.ids = torch.empty(0, 0, dtype=torch.int32)

    def __call__(
        self, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights, self.ids


class Layer:
    """vLLM's MoE layer, called as `b12x_core.adapters.MoELayer`."""

    def __init__(self, case: MoECase, vllm_config: VllmConfig, layer: torch.nn.Module, routing: _Routing) -> None:
        self._case = case
        self._vllm_config = vllm_config
        self.layer = layer
        self._routing = routing

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Run the layer's own forward pass with the routing given. x is copied: vLLM may overwrite it."""
        self._routing.weights, self._routing.ids = topk_weights, topk_ids
        logits = x.new_zeros(x.shape[0], self._case.num_experts)
        with torch.no_grad(), forward_context(self._vllm_config, num_tokens=x.shape[0]):
            result: torch.Tensor = self.layer(hidden_states=x.clone(), router_logits=logits)
        return result


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set owner.name for the length of the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _construct(case: MoECase, vllm_config: VllmConfig, routing: _Routing) -> Any:
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    activation = case.activation
    constants: dict[str, float | None] = {}
    if not case.is_gpt_oss:
        constants["swiglu_limit"] = activation.limit
    if activation.function == "swiglu" and not case.is_gpt_oss:
        constants |= {"swiglu_alpha": activation.alpha, "swiglu_beta": activation.beta}
    vllm_config.parallel_config.enable_expert_parallel = case.ep_size > 1
    # In a group of ep_size processes vLLM would take the share of the experts from this rank.
    with _replaced(config, "get_tensor_model_parallel_rank", lambda: case.ep_rank):
        return FusedMoEFactory(
            num_experts=case.num_experts,
            top_k=case.top_k,
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            params_dtype=case.dtype,
            renormalize=False,
            quant_config=_quant_config(case),
            tp_size=case.ep_size,
            prefix=_PREFIX,
            custom_routing_function=routing,
            activation=_activation_name(case),
            apply_router_weight_on_input=case.router_weight_on_input,
            has_bias=any(name.endswith("bias") for name in case.tensors),
            ckpt_names=("gate_proj", "down_proj", "up_proj") if activation.gated else ("up_proj", "down_proj", None),
            moe_config_cls=_moe_config_class(case),
            routed_experts_cls=GptOssRoutedExperts if case.is_gpt_oss else None,
            **constants,
        )


def _activation_name(case: MoECase) -> str:
    """The activation's name in vLLM, which for swiglu tells whether gate and up rows alternate."""
    activation: Activation = case.activation
    if activation.function == "swiglu":
        return "swigluoai" if case.is_gpt_oss else "swigluoai_uninterleave"
    return activation.function if activation.gated else f"{activation.function}_no_mul"


def _moe_config_class(case: MoECase) -> type | None:
    """None for vLLM's own class; on a CPU one that lets experts be without a gate, as on CUDA."""
    if case.activation.gated or torch.device(case.device).type != "cpu":
        return None
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    class NotGatedConfig(FusedMoEConfig):
        """vLLM refuses such experts on a CPU while it constructs the config, as its own CPU kernel lacks them."""

        _constructed = False

        def __post_init__(self) -> None:
            super().__post_init__()
            self._constructed = True

        @property
        def is_act_and_mul(self) -> bool:
            return not self._constructed or bool(self.activation.is_gated)

    return NotGatedConfig


def _quant_config(case: MoECase) -> Any:
    """The quantization config as vLLM parses it from a checkpoint's config.json."""
    if not case.is_gpt_oss:
        return quantization_config(case.quantization, {})
    # vLLM tells gpt-oss from other MXFP4 checkpoints by the type of the model.
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    return GptOssMxfp4Config.from_config(dict(case.quantization or {}))


def _load(layer: Any, case: MoECase) -> None:
    """Load the case's tensors as the model's own loading does.

    Raises:
        ArgumentError: the layer has no place for a tensor.
    """
    if not case.is_gpt_oss:
        _load_by_expert(layer, case)
        return
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssModel

    class Model(torch.nn.Module):
        """What `GptOssModel` needs of itself to load experts."""

        _try_load_streamed_expert = GptOssModel._try_load_streamed_expert
        load_experts = GptOssModel._load_weights_mxfp4

        def __init__(self) -> None:
            super().__init__()
            self.mlp = torch.nn.Module()
            self.mlp.experts = layer
            self.config = SimpleNamespace(num_local_experts=case.num_experts, intermediate_size=case.intermediate)
            self.parallel_config = SimpleNamespace(enable_expert_parallel=case.ep_size > 1)

    share = case.num_experts // case.ep_size
    named = ((f"mlp.experts.{name}", tensor) for name, tensor in case.tensors.items())
    mapped = GptOssForCausalLM.hf_to_vllm_mapper.apply(named)
    Model().load_experts((case.ep_rank + 1) * share, case.ep_rank * share, mapped, [])


def _load_by_expert(layer: Any, case: MoECase) -> None:
    given: list[str] = []
    taken: set[str] = set()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in case.tensors.items():
            given.append(name)
            yield name, tensor

    for _ in layer.load_weights(tensors()):
        taken.add(given[-1])  # vLLM names the parameter it filled, one tensor at a time
    local = layer.routed_experts.expert_map_manager.map_global_to_local
    left = [name for name in given if name not in taken and local(int(name.partition(".")[0])) >= 0]
    if left:
        raise ArgumentError(f"case.tensors: vLLM's layer has no place for {', '.join(left)}")
