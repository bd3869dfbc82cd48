"""The quantization method of every `FusedMoE` layer that b12x serves."""

from __future__ import annotations

from typing import Any

import b12x_core
import torch
from b12x_core import Scheme, UnsupportedError
from sglang.srt.layers.moe import MoeRunner, MoeRunnerConfig, get_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

from b12x_sglang.logs import say_served
from b12x_sglang.moe import schemes, weights
from b12x_sglang.moe.runner import Experts


class B12xMoEMethod(FusedMoEMethodBase):
    """Serves a layer with the parameters of SGLang's own method for it.

    That method creates the parameters, and SGLang's loaders go by it; what it would make of them afterwards, which is
    laid out for other kernels, never happens.

    Args:
        method: SGLang's own method, where the layer's model chose it; else None.
        quant_config: chooses it otherwise, None for unquantized layers.
        prefix: name of the layer.
    """

    def __init__(self, method: FusedMoEMethodBase | None, quant_config: QuantizationConfig | None, prefix: str) -> None:
        self._method = method
        self._quant_config = quant_config
        self._prefix = prefix
        self._scheme: Scheme | None = None

    def create_weights(self, layer: Any, *, intermediate_size_per_partition: int, **arguments: Any) -> None:
        """Have SGLang's own method create the layer's parameters.

        Raises:
            UnsupportedError: the layer is not served; one sentence that names it.
        """
        method = self._method = self._choose(layer)
        scheme = schemes.scheme_of(layer, method, self._prefix)
        if isinstance(scheme, str):
            raise self._unsupported(layer, scheme)
        self._scheme = scheme
        if isinstance(method, Mxfp4MoEMethod):
            # What this flag means for parameters: as the checkpoint has them, without padding.
            method.use_deep_gemm = True
            if schemes.interleaved(layer.moe_runner_config):
                # Such experts are split over ranks by whole blocks. Rows that no block fills stay zero, behind the
                # others, and zero they contribute.
                intermediate_size_per_partition += -intermediate_size_per_partition % 32
        reason = schemes.refuse(layer, b12x_core.serving_scheme(scheme), intermediate_size_per_partition)
        if reason is None and layer.quant_method is not self:
            reason = f"b12x holds all experts of a rank, and {type(layer.quant_method).__name__} holds them elsewhere"
        if reason is not None:
            raise self._unsupported(layer, reason)
        layer.weight_load_method = method
        method.create_weights(layer=layer, intermediate_size_per_partition=intermediate_size_per_partition, **arguments)
        if not layer.moe_runner_config.is_gated:
            weights.drop_missing_projection(layer, intermediate_size_per_partition)
        weights.complete(layer)

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        """Make the runner that `apply` calls."""
        # SGLang's loader asks its own method for the order of gate and up, which may depend on this.
        assert self._method is not None
        self._method.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the loaded experts. When weights are loaded again, prepared ones keep their addresses."""
        config = layer.moe_runner_config
        activation = schemes.activation_of(config)  # once more: models may change the configuration after construction
        if isinstance(activation, str):
            raise self._unsupported(layer, activation)
        assert self._scheme is not None
        earlier: Experts | None = getattr(layer, "b12x_experts", None)
        prepared = weights.prepare(
            layer,
            self._scheme,
            interleaved=schemes.interleaved(config),
            into=earlier.weights if earlier is not None else None,
        )
        layer.b12x_experts = Experts(prepared, activation)
        say_served("mixtures of experts", prepared.scheme.name)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Make room for a checkpoint's weights again, which SGLang asks for before it loads another checkpoint."""
        weights.restore(layer)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Run the experts: `StandardDispatchOutput` -> `StandardCombineInput`."""
        assert self.runner is not None
        return self.runner.run(dispatch_output, layer.b12x_experts)

    def get_moe_quant_info(self, layer: torch.nn.Module, runner_backend: Any) -> Any:
        """Asked for by LoRA of experts alone, which is refused."""
        raise self._unsupported(layer, "b12x has no LoRA of experts")

    def _choose(self, layer: Any) -> FusedMoEMethodBase:
        """SGLang's own method, as `FusedMoE` itself would have chosen it."""
        method = self._method
        if method is None and self._quant_config is not None:
            method = self._quant_config.get_quant_method(layer, self._prefix)
        return UnquantizedFusedMoEMethod() if method is None else method

    def _unsupported(self, layer: Any, reason: str) -> UnsupportedError:
        return UnsupportedError(f"{self._prefix or f'experts of layer {layer.layer_id}'}: {reason}")
