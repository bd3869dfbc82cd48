"""What stands in the place of SGLang's method for a linear layer: its parameters and loaders, b12x's op.

SGLang looks at the class of a layer's method in many places, to hand it activations that are quantized already or to
read a built-in kernel's layout from the layer. So the methods here derive from none of SGLang's: each *holds* the one
that it replaces, and lets it register the parameters, as the loaders expect them. From there on the tensors stay as the
checkpoint has them, which is what a weight update writes into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from b12x_core import (
    FP8_BLOCK,
    LinearWeights,
    Scheme,
    UnsupportedError,
    linear,
    lost_block_scales,
    prepare_projections,
    serving_scheme,
    supports_linear,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsLinearScheme
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from b12x_sglang.logs import say_served

PREPARED = "b12x_linear"
"""Attribute of a layer that holds its `LinearWeights`."""


@dataclass(frozen=True)
class Stored:
    """What a layer's parameters hold once they are loaded.

    Attributes:
        scheme: the checkpoint's.
        weight, scale, global_scale, input_scale: names of the parameters, None where there is none. A layer of fused
            projections has a scale a tensor and a global scale for each of them.
        divisors: global and input scales divide, as compressed-tensors has them.
        pre_scale: parameter (K,) that the activation is multiplied with first, of AWQ.
    """

    scheme: Scheme
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str | None = None
    input_scale: str | None = None
    divisors: bool = False
    pre_scale: str | None = None


class Served:
    """A linear layer's loading and computing, shared by what SGLang calls a method and what it calls a scheme.

    Args:
        own: SGLang's method or scheme, which registers the parameters.
        stored: what it makes of them.
        name: the layer's, for sentences.
    """

    def __init__(self, own: Any, stored: Stored, name: str) -> None:
        self.own = own
        self.stored = stored
        self.name = name
        self.rows: Sequence[int] = ()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **rest: Any,
    ) -> None:
        """Let SGLang register the layer's parameters.

        Args:
            layer: the layer.
            input_size_per_partition, output_partition_sizes: K and the rows of each projection on this rank.
            input_size, output_size: K and all rows on all ranks.
            params_dtype: of activations.
            **rest: the parameters' loader, and what SGLang's method may take beside it.

        Raises:
            UnsupportedError: nothing serves the layer, or SGLang's loader would lose some of its scales.
        """
        self.rows = tuple(output_partition_sizes)
        n, k = sum(self.rows), input_size_per_partition
        if self.stored.scheme.weight == FP8_BLOCK:
            ranks = -(-output_size // n)
            lost = _lost_block_scales(self.rows, k, ranks=ranks, split_columns=k != input_size)
            if lost is not None:
                raise UnsupportedError(f"{self.name}: {lost}")
            if len(self.rows) > 1 and self.rows[-1] % 128:
                # SGLang's own check refuses this, too, but its loader keeps the scales.
                rest["skip_block_quant_check"] = True
        with torch.no_grad():
            self.own.create_weights(
                layer=layer,
                input_size_per_partition=input_size_per_partition,
                output_partition_sizes=output_partition_sizes,
                input_size=input_size,
                output_size=output_size,
                params_dtype=params_dtype,
                **rest,
            )
        weight = getattr(layer, self.stored.weight)
        _load_by_either_name(layer)
        # Early, so that nobody waits for a checkpoint to load. `prepare_projections` asks about the final form.
        support = supports_linear(serving_scheme(self.stored.scheme), n, k, weight.device)
        if not support.ok:
            raise UnsupportedError(f"{self.name}: {support.reason}")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare what was loaded. Called again after a weight update, it fills the same storage.

        Raises:
            UnsupportedError: nothing serves the layer. The sentence names it.
        """
        stored = self.stored
        weight = getattr(layer, stored.weight)
        if stored.pre_scale is not None and len(self.rows) > 1 and bool((getattr(layer, stored.pre_scale) != 1).any()):
            raise UnsupportedError(
                f"{self.name}: SGLang's loader mixes the activation scales (pre_quant_scale) of fused projections"
            )
        try:
            prepared = prepare_projections(
                stored.scheme,
                self.rows,
                weight.detach(),
                getattr(layer, stored.scale).detach(),
                global_scale=self._multiplier(layer, stored.global_scale),
                input_scale=self._multiplier(layer, stored.input_scale),
                into=getattr(layer, PREPARED, None),
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.name}: {error}") from error
        if weight.data_ptr() != prepared.weight.data_ptr():
            weight.data = prepared.weight  # one copy in memory, whichever form the op reads
        if not hasattr(layer, PREPARED):
            self._publish(layer, prepared)
            say_served("linear layers", prepared.scheme.name)
        if isinstance(layer, ParallelLMHead):
            layer.weight = weight  # SGLang takes a head without an attribute of this name for one that is not there

    def _publish(self, layer: torch.nn.Module, prepared: LinearWeights) -> None:
        """Hand prepared weights to the layer.

        Scales that are no parameter as they are (one a row, where the checkpoint has one a projection) become buffers:
        SGLang saves and copies the state of a processed layer, and these belong to it.
        """
        setattr(layer, PREPARED, prepared)
        held = {parameter.data_ptr() for parameter in layer.parameters()}
        for name in ("scale", "global_scale", "input_scale"):
            tensor: torch.Tensor | None = getattr(prepared, name)
            if tensor is not None and tensor.data_ptr() not in held:
                layer.register_buffer(f"b12x_{name}", tensor)

    def run(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """From x (..., K) to (..., N), bias (N,) added. Where the scheme has quantized activations, the op does it."""
        weights: LinearWeights = getattr(layer, PREPARED)
        if self.stored.pre_scale is not None:
            x = x * getattr(layer, self.stored.pre_scale)
        return linear(x, weights if bias is None else replace(weights, bias=bias))

    def _multiplier(self, layer: torch.nn.Module, name: str | None) -> torch.Tensor | None:
        """Scales (P,) of the projections."""
        if name is None:
            return None
        scales: torch.Tensor = getattr(layer, name).detach()
        return scales.reciprocal() if self.stored.divisors else scales


class B12xLinearMethod(Served, LinearMethodBase):
    """In the place of a method of SGLang.

    Attributes:
        quant_config, weight_block_size: as the replaced method has them; loaders of SGLang and of its models ask.
    """

    def __init__(self, own: Any, stored: Stored, name: str) -> None:
        super().__init__(own, stored, name)
        self.quant_config = getattr(own, "quant_config", None)
        self.weight_block_size = getattr(own, "weight_block_size", None)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Served.run`."""
        return self.run(layer, x, bias)


class B12xCompressedTensorsScheme(Served, CompressedTensorsLinearScheme):
    """In the place of a scheme of SGLang's compressed-tensors method, which stays."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Served.run`."""
        return self.run(layer, x, bias)


def holds_its_weight(layer: Any) -> bool:
    """Whether a layer that b12x serves still has the weight that was prepared; true of any other layer."""
    prepared: LinearWeights | None = getattr(layer, PREPARED, None)
    return prepared is None or bool(layer.weight.data_ptr() == prepared.weight.data_ptr())


def _load_by_either_name(layer: torch.nn.Module) -> None:
    """Let block scales be loaded as weight_scale, too: SGLang's Llama renames them for any checkpoint.

    A second parameter over the same storage, since SGLang lists each object once.
    """
    own = getattr(layer, "weight_scale_inv", None)
    if own is not None:
        alias = torch.Tensor._make_subclass(type(own), own.data)
        vars(alias).update(vars(own))
        layer.register_parameter("weight_scale", alias)


def _lost_block_scales(rows: Sequence[int], k: int, *, ranks: int, split_columns: bool) -> str | None:
    """Why SGLang's loader loses block scales of a layer, None if it keeps them.

    It gives each rank whole blocks, whatever rows and columns the rank has.

    Args:
        rows: of each projection on this rank.
        k: columns on this rank.
        ranks: over which the rows are split.
        split_columns: whether other ranks have other columns.
    """
    if lost := lost_block_scales("SGLang", rows, ranks):
        return lost
    if ranks > 1 and rows[0] % 128:
        return f"SGLang cannot load block scales of {rows[0]} rows a rank, which are no multiple of 128"
    if split_columns and k % 128:
        return f"SGLang cannot load block scales of {k} columns a rank, which are no multiple of 128"
    return None
