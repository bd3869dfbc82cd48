"""Hook `b12x_linear_layer`: a linear layer of vLLM, built and loaded as a model of vLLM does it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from b12x_core import ArgumentError, UnsupportedError, lost_block_scales
from b12x_core.adapters import LinearCase

from b12x_vllm.hooks.context import layer_context

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

UNQUANTIZED = "vLLM runs this layer unquantized, with kernels that --linear-backend does not choose"
"""Why such a layer has no place behind the flag."""


class Layer:
    """A loaded layer of vLLM: x (M, K) -> (M, sum of N).

    Attributes:
        module: the layer.
    """

    def __init__(self, case: LinearCase) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        with layer_context(case.dtype, case.device) as config:
            # Quantization methods read the activation dtype from the model's configuration, here without a model.
            config.model_config = SimpleNamespace(dtype=case.dtype, quantization_config=None)
            try:
                self.module = _construct(case)
                if isinstance(self.module.quant_method, UnquantizedLinearMethod):
                    raise UnsupportedError(UNQUANTIZED)
                record_metadata_for_reloading(self.module)
                self.load(case.tensors)
            finally:
                config.model_config = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer's own forward."""
        y: torch.Tensor = self.module(x)
        return y

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Feed the layer, and have vLLM process what came."""
        self.feed(tensors)
        self.module.quant_method.process_weights_after_loading(self.module)

    def feed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give checkpoint tensors to the parameters' own loaders.

        Raises:
            ArgumentError: the layer has no parameter for a tensor.
        """
        parameters = dict(self.module.named_parameters())
        for key, tensor in tensors.items():
            projection, _, name = key.rpartition(".")
            if name not in parameters:
                raise ArgumentError(
                    f"case.tensors: vLLM's layer has parameters {', '.join(sorted(parameters))}; got {key}"
                )
            parameter = parameters[name]
            shard = self.module.b12x_shards.get(projection)
            parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))


def cannot_express(case: LinearCase) -> str | None:
    """Why vLLM's linear layers cannot hold a case, None if they can."""
    method = (case.quantization or {}).get("quant_method")
    if method in (None, "mxfp4"):
        return UNQUANTIZED
    if any(name.endswith("weight_scale_inv") for name in case.tensors):
        return lost_block_scales("vLLM", [rows for _, rows in case.shards])
    return None


def build(case: LinearCase) -> Layer:
    """See `b12x_core.adapters.AdapterSpec.b12x_linear_layer`.

    Raises:
        ArgumentError: the case's tensors do not belong to the layer that its `quantization` describes.
        UnsupportedError: nothing serves the layer.
    """
    return Layer(case)


def quantization_config(
    quantization: Mapping[str, Any] | None, packed_modules: Mapping[str, list[str]]
) -> QuantizationConfig | None:
    """The `quantization_config` of a config.json, recognised and parsed by vLLM as it does for a model.

    Args:
        quantization: its content, None for an unquantized checkpoint.
        packed_modules: fused module -> its projections, as a model declares it.
    """
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    if quantization is None:
        return None
    content = copy.deepcopy(dict(quantization))
    hf_config = SimpleNamespace(quantization_config=content)
    # Both read nothing of the model but what is given here.
    convertor = SimpleNamespace(hf_config=hf_config)
    normalized = ModelArchConfigConvertorBase._normalize_quantization_config(convertor, hf_config)
    model = SimpleNamespace(
        quantization=None,
        model_arch_config=SimpleNamespace(quantization_config=normalized),
        hf_config=hf_config,
        allow_deprecated_quantization=False,
    )
    ModelConfig._verify_quantization(model)
    parsed: QuantizationConfig = get_quantization_config(model.quantization).from_config(normalized)
    parsed.packed_modules_mapping = {name: list(projections) for name, projections in packed_modules.items()}
    return parsed


def _construct(case: LinearCase) -> LinearBase:
    """The layer, with its parameters not loaded yet."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear

    names, rows = zip(*case.shards, strict=True)
    common: dict[str, Any] = {
        "bias": any(key.endswith(".bias") for key in case.tensors),
        "params_dtype": case.dtype,
        "quant_config": quantization_config(case.quantization, {case.fused_name: list(names)}),
        "return_bias": False,
    }
    shards: dict[str, int | str] = {}
    if len(names) == 1:
        module = ReplicatedLinear(case.k, rows[0], prefix=f"model.layers.0.{names[0]}", **common)
    elif case.is_qkv and case.head_size is not None:
        shards = dict(zip(names, "qkv", strict=True))
        heads, kv_heads = rows[0] // case.head_size, rows[1] // case.head_size
        prefix = f"model.layers.0.self_attn.{case.fused_name}"
        module = QKVParallelLinear(case.k, case.head_size, heads, kv_heads, prefix=prefix, **common)
    else:
        shards = {name: index for index, name in enumerate(names)}
        module = MergedColumnParallelLinear(
            case.k, list(rows), prefix=f"model.layers.0.mlp.{case.fused_name}", **common
        )
    module.b12x_shards = shards
    return module
