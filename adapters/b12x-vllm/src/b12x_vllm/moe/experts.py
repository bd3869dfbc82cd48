"""The experts that vLLM's modular MoE kernel calls, and the weights they were given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import b12x_core
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from b12x_core import FP8_TENSOR, ExpertWeights, Scheme, supports_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

from b12x_vllm import warmup
from b12x_vllm.moe import schemes


def refuse(moe: FusedMoEConfig, scheme: Scheme) -> str | None:
    """Why the experts of a layer are not served in a scheme, None if they are."""
    if moe.in_dtype not in (torch.bfloat16, torch.float16):
        return f"b12x takes bfloat16 or float16 tokens; got {moe.in_dtype}"
    reason = schemes.refuse_activation(moe.activation)
    if reason is not None:
        return reason
    parallel = moe.moe_parallel_config
    if parallel.enable_eplb:
        return "b12x prepares experts once, and expert load balancing (EPLB) moves them between ranks afterwards"
    if parallel.use_passthrough_all2all or (parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels):
        return f"b12x takes tokens from the all2all backend allgather_reducescatter; got {parallel.all2all_backend}"
    activation = schemes.activation_of(moe.activation, moe, FusedMoEQuantConfig.make())
    return supports_moe(
        scheme,
        moe.num_local_experts,
        moe.hidden_dim,
        moe.intermediate_size_per_partition,
        activation,
        moe.device,
    ).reason


class B12xExperts(mk.FusedMoEExpertsModular):
    """Experts of a layer, from 16-bit tokens with their routing to 16-bit tokens, reduced over the routes.

    Attributes:
        weights: the layer's prepared experts, None until the layer's weights were processed.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        super().__init__(moe_config, quant_config)
        self.weights: ExpertWeights | None = None
        self._activation = schemes.activation_of(moe_config.activation, moe_config, quant_config)

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """Whether a layer is served, else why not: the core's reason first, then what vLLM itself asks for."""
        scheme = schemes.of_keys(weight_key, activation_key, moe_config.in_dtype)
        if scheme is None:
            return False, schemes.refuse_keys(weight_key, activation_key, moe_config.intermediate_size_per_partition)
        reason = refuse(moe_config, b12x_core.serving_scheme(scheme))
        if reason is not None:
            return False, reason
        answer: tuple[bool, str | None] = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        return answer

    # What vLLM asks one by one is answered with the whole layer in view, in `is_supported_config`.

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Tokens in a plain (M, H) matrix."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return schemes.of_keys(weight_key, activation_key, torch.bfloat16) is not None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return schemes.refuse_activation(activation) is None

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Yes: the op quantizes activations itself, by the scheme's rule."""
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing: the op has applied the routing weights and added up."""
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """E, M, N, K, top_k. From the prepared experts, since w1 and w2 may no longer have the checkpoint's shape."""
        weights = self._prepared()
        rows = weights.intermediate * (2 if weights.gated else 1)
        return weights.num_experts, a1.shape[0], rows, weights.hidden, topk_ids.shape[1]

    def workspace_shapes(
        self,
        M: int,  # noqa: N803 - the names are vLLM's
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No scratch from vLLM (the op's comes from torch's allocator), and a result of (M, K)."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the layer's result for hidden_states (M, H) to output (M, H).

        With `apply_router_weight_on_input` vLLM has multiplied the tokens already, so the routes count once each.
        """
        b12x_core.fused_moe(
            hidden_states,
            self._prepared(),
            torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights,
            topk_ids,
            activation=self._activation,
            expert_map=expert_map,
            out=output,
        )

    def run(self, tokens: int, dtype: torch.dtype) -> None:
        """Run the op once on zeros, the routes spread over the experts (for warm-up)."""
        weights, top_k = self._prepared(), self.moe_config.experts_per_token
        routes = torch.arange(tokens * top_k, device=weights.w13.device).view(tokens, top_k)
        b12x_core.fused_moe(
            torch.zeros(tokens, weights.hidden, dtype=dtype, device=weights.w13.device),
            weights,
            torch.zeros_like(routes, dtype=torch.float32),
            (routes % weights.num_experts).int(),
            activation=self._activation,
        )

    def serve(self, layer: torch.nn.Module, weights: ExpertWeights) -> None:
        """Use a layer's prepared experts from now on, and have vLLM warm up their op."""
        self.weights = weights
        sizes = (weights.num_experts, weights.hidden, weights.intermediate, self.moe_config.experts_per_token)
        key = (weights.scheme.name, *sizes, self._activation, weights.interleaved)
        warmup.attach(layer, "moe", key, self.run)

    def _prepared(self) -> ExpertWeights:
        if self.weights is None:
            raise RuntimeError("b12x: an MoE layer ran before its weights were processed")
        return self.weights


@dataclass(frozen=True)
class LoadedScales:
    """Scales of a layer as its checkpoint has them: vLLM merges them when it processes the weights.

    For both projections of w13 it goes on with one weight scale (NVFP4: the gate's, with a warning where they differ;
    FP8: the larger, after rounding the weights anew), and for all FP8 experts with one input scale.

    Attributes:
        shard: (E, projections) float32 multipliers of w13: the global scales of NVFP4, the scales of FP8 tensors. None
            for formats without such scales.
        w13_input, w2_input: (E,) or, a projection each, (E, projections) float32 multipliers, None without.
    """

    shard: torch.Tensor | None
    w13_input: torch.Tensor | None
    w2_input: torch.Tensor | None

    @classmethod
    def of(cls, layer: Any) -> LoadedScales:
        """Those of a `RoutedExperts` whose weights were just loaded."""
        shard = _multiplier(layer, "w13_weight_global_scale", "w13_weight_scale_2", "w13_weight_scale")
        return cls(
            shard if shard is None or shard.dim() == 2 else None,
            _multiplier(layer, "w13_input_global_scale", "w13_input_scale"),
            _multiplier(layer, "w2_input_global_scale", "w2_input_scale"),
        )


def _multiplier(layer: Any, *names: str) -> torch.Tensor | None:
    """A copy of the first of these scales that the layer has, None if it has none but scales of blocks or rows."""
    for name in names:
        scale = getattr(layer, name, None)
        if scale is not None and scale.dtype == torch.float32 and scale.dim() <= 2:
            # What compressed-tensors calls a global scale is its inverse.
            return 1.0 / scale.data if name.endswith("_global_scale") else scale.data.clone()
    return None


def prepare(
    layer: Any,
    moe: FusedMoEConfig,
    config: FusedMoEQuantConfig,
    scheme: Scheme,
    loaded: LoadedScales,
    into: ExpertWeights | None,
) -> ExpertWeights:
    """Prepare the experts of a layer whose weights vLLM has loaded and processed.

    Args:
        layer: vLLM's `RoutedExperts`.
        moe, config: what vLLM knows about it.
        scheme: the checkpoint's.
        loaded: the layer's scales from before the processing.
        into: what an earlier call returned for the layer, to be filled again in place.
    """
    w13_scale, w13_global_scale = _data(config.w1_scale), None
    if scheme.weight.global_scale:
        w13_global_scale = _data(config.g1_alphas) if loaded.shard is None else loaded.shard
    elif scheme.weight == FP8_TENSOR and loaded.shard is not None:
        w13_scale = loaded.shard
    weights = b12x_core.prepare_expert_projections(
        scheme,
        layer.w13_weight.data,
        w13_scale,
        layer.w2_weight.data,
        _data(config.w2_scale),
        w13_global_scale=w13_global_scale,
        w2_global_scale=_data(config.g2_alphas) if scheme.weight.global_scale else None,
        w13_input_scale=loaded.w13_input,
        w2_input_scale=loaded.w2_input,
        w13_bias=_data(config.w1_bias),
        w2_bias=_data(config.w2_bias),
        gate_up="interleaved" if schemes.interleaved(moe.activation) else "halves",
        into=into,
    )
    # The layer holds what the op reads, so that the weights exist once however the core lays them out.
    layer.w13_weight.data = weights.w13
    layer.w2_weight.data = weights.w2
    return weights


def _data(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.data
