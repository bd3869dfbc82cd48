"""The runner core that SGLang's `MoeRunner` calls for the backend b12x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import b12x_core
import torch
from b12x_core import Activation, ExpertWeights
from sglang.srt.layers.moe.moe_runner import register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo, MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, resolve_moe_runner_backend

from b12x_sglang.flags import FLAG


@dataclass
class Experts(MoeQuantInfo):
    """The loaded experts of a layer, as its method hands them to the runner.

    Attributes:
        weights: prepared weights.
        activation: between the two GEMMs.
    """

    weights: ExpertWeights
    activation: Activation


class B12xRunnerCore(DispatchMoeRunnerCore):
    """Experts of a layer, from the tokens and routes of SGLang's standard dispatcher to their sum."""

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        """The backend b12x."""
        return resolve_moe_runner_backend(FLAG)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: MoeQuantInfo, runner_config: MoeRunnerConfig, hooks: Any = None
    ) -> StandardCombineInput:
        """Run the experts of this rank.

        Args:
            dispatch_output: `StandardDispatchOutput`: hidden_states (T, H) and topk_output with topk_weights (T, k)
                and topk_ids (T, k), the latter local to the rank, -1 for an expert of another one or for padding.
            quant_info: `Experts`.
            runner_config: the layer's. As with SGLang's default runner on a GPU, its routed scaling factor is applied
                here, unless the routed weights contain it.
            hooks: of LoRA, always None: `B12xMoEMethod` refuses LoRA of experts.
        """
        assert isinstance(quant_info, Experts)
        assert hooks is None
        routes = dispatch_output.topk_output
        result: torch.Tensor = b12x_core.fused_moe(
            dispatch_output.hidden_states,
            quant_info.weights,
            routes.topk_weights,
            routes.topk_ids,
            activation=quant_info.activation,
            router_weight_on_input=runner_config.apply_router_weight_on_input,
            routed_scaling=_outstanding_scaling(runner_config),
        )
        return StandardCombineInput(hidden_states=result)


def _outstanding_scaling(config: MoeRunnerConfig) -> float:
    """The routed scaling factor, 1 where the routed weights of the layer have it already."""
    if config.routed_scaling_factor is None or getattr(
        config.layer, "should_fuse_routed_scaling_factor_in_topk", False
    ):
        return 1.0
    return float(config.routed_scaling_factor)


def register() -> None:
    """Make b12x a runner backend of this process."""
    register_moe_runner_core(FLAG, B12xRunnerCore)
