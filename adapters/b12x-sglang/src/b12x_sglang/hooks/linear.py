"""Hook `b12x_linear_layer`: a linear layer of SGLang, built and loaded as a model of SGLang does it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from b12x_core import ArgumentError, UnsupportedError, lost_block_scales
from b12x_core.adapters import LinearCase

from b12x_sglang.hooks.context import layer_context, small_model

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

UNQUANTIZED = "SGLang runs this layer unquantized, with kernels that no b12x flag chooses"
"""Why such a layer has no place behind the flags."""


class Layer:
    """A loaded layer of SGLang: x (M, K) -> (M, sum of N).

    Attributes:
        module: the layer.
        shards: projection -> how the layer's loaders call it; empty for a layer of one projection.
    """

    def __init__(self, case: LinearCase) -> None:
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
        from sglang.srt.runtime_context import get_context

        with layer_context(case.dtype, case.device):
            self._context = get_context()
            config = quantization_config(case.quantization, {case.fused_name: [name for name, _ in case.shards]})
            if config is None:
                raise UnsupportedError(UNQUANTIZED)
            self.module, self.shards = _construct(case, config)
            if isinstance(self.module.quant_method, UnquantizedLinearMethod):
                raise UnsupportedError(UNQUANTIZED)
            self.load(case.tensors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer's own forward."""
        from sglang.srt.runtime_context import use_context

        with use_context(self._context), torch.no_grad():
            y, _ = self.module(x)
        result: torch.Tensor = y
        return result

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Feed the layer, and have SGLang process what came: for the first time, or as a weight update."""
        self.module.quant_method.restore_weights_before_loading(self.module)
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
                    f"case.tensors: SGLang's layer has parameters {', '.join(sorted(parameters))}; got {key}"
                )
            parameter = parameters[name]
            shard = self.shards.get(projection)
            parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))


def cannot_express(case: LinearCase) -> str | None:
    """Why SGLang's linear layers cannot hold a case, None if they can."""
    config = case.quantization or {}
    if config.get("quant_method") in (None, "mxfp4"):
        return UNQUANTIZED
    if any(name.endswith("weight_scale_inv") for name in case.tensors):
        return lost_block_scales("SGLang", [rows for _, rows in case.shards])
    return None


def build(case: LinearCase) -> Layer:
    """See `b12x_core.adapters.AdapterSpec.b12x_linear_layer`.

    Raises:
        ArgumentError: the case's tensors do not belong to the layer that its `quantization` describes.
        UnsupportedError: nothing serves the layer.
    """
    return Layer(case)


def quantization_config(
    quantization: Mapping[str, Any] | None, packed_modules: Mapping[str, Sequence[str]]
) -> QuantizationConfig | None:
    """The `quantization_config` of a config.json, recognised and parsed by SGLang as it does for a model.

    Args:
        quantization: its content, None for an unquantized checkpoint.
        packed_modules: fused module -> its projections, as a model declares it.
    """
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    if quantization is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        config = {**json.loads((small_model() / "config.json").read_text()), "quantization_config": dict(quantization)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(folder)
        parsed: QuantizationConfig = get_quant_config(
            model, LoadConfig(), {name: list(projections) for name, projections in packed_modules.items()}
        )
    return parsed


def _construct(case: LinearCase, config: QuantizationConfig) -> tuple[LinearBase, dict[str, int | str]]:
    """The layer, with its parameters not loaded yet, and its `Layer.shards`."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear

    names, rows = zip(*case.shards, strict=True)
    common: dict[str, Any] = {
        "bias": any(key.endswith(".bias") for key in case.tensors),
        "params_dtype": case.dtype,
        "quant_config": config,
    }
    if len(names) == 1:
        return ReplicatedLinear(case.k, rows[0], prefix=f"model.layers.0.{names[0]}", **common), {}
    if case.is_qkv and case.head_size is not None:
        heads, kv_heads = rows[0] // case.head_size, rows[1] // case.head_size
        prefix = f"model.layers.0.self_attn.{case.fused_name}"
        module = QKVParallelLinear(case.k, case.head_size, heads, kv_heads, prefix=prefix, **common)
        return module, dict(zip(names, "qkv", strict=True))
    module = MergedColumnParallelLinear(case.k, list(rows), prefix=f"model.layers.0.mlp.{case.fused_name}", **common)
    return module, {name: index for index, name in enumerate(names)}
