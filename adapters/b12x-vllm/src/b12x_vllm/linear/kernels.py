"""A kernel class for each of vLLM's linear kernel kinds. They differ in what vLLM tells them; all end in one op.

vLLM selects a class for a layer (`is_supported`, `can_implement`), lets the layer's quantization method load the
checkpoint and bring it into the kind's form, then calls `process_weights_after_loading` once and `apply_weights` in
every step. A class says which scheme its configuration means and which parameters of the layer hold the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from b12x_core import (
    BF16,
    FP8_BLOCK,
    FP8_GROUP,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    SCHEMES,
    Format,
    LinearWeights,
    Scheme,
    UnsupportedError,
    linear,
    lost_block_scales,
    prepare_projections,
    serving_scheme,
    supports_linear,
)
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearKernel, MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel, Mxfp8LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    QuantKey,
    kFp8DynamicTokenSym,
    kMxfp4Dynamic,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from b12x_vllm import warmup

logger = init_logger(__name__)

PREPARED = "b12x_linear"
"""Attribute of a layer that holds its `LinearWeights`."""

PROJECTION_SCALES = "b12x_projection_scales"
"""Attribute of a fused layer that holds one scale a projection until the weights are prepared: see `checkpoint`."""

Answer = tuple[bool, str | None]


def projection_rows(layer: Any) -> list[int]:
    """Rows that each projection of a layer has on this rank; one projection unless it is fused."""
    return list(layer.logical_widths)


class LinearKernel:
    """What the kernel classes share.

    Attributes:
        probe: a scheme of the class; `is_supported` asks the core about it before any configuration is known.
        parameters: where a layer keeps the arguments of `prepare_projections`: argument -> parameter name.
        moved: arguments that came out of `prepare_projections` as other tensors than the layer's parameters.
    """

    probe: ClassVar[Scheme]
    parameters: ClassVar[Mapping[str, str]] = {"weight": "weight", "scale": "weight_scale"}
    config: Any
    moved: Sequence[str] = ()

    @classmethod
    def scheme_of(cls, config: Any) -> Scheme:
        """The checkpoint's scheme, as a kernel configuration of vLLM states it.

        Raises:
            UnsupportedError: it is none that the core knows.
        """
        del config
        return cls.probe

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether the device serves this kind of layer, and the reason if not. The core looks at the device itself."""
        del compute_capability
        if envs.VLLM_BATCH_INVARIANT:
            return False, "does not promise batch-invariant results (VLLM_BATCH_INVARIANT=1)"
        return _served(cls.probe)

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        """Whether this layer is served, and the reason if not.

        The configurations of NVFP4 and MXFP4 carry no shape; theirs is checked when the weights are prepared.
        """
        for dtype in (getattr(config, "input_dtype", None), getattr(config, "out_dtype", None)):
            if dtype not in (None, torch.bfloat16, torch.float16):
                return False, f"serves bfloat16 and float16 activations; got {dtype} (see --dtype)"
        try:
            return _served(cls.scheme_of(config), getattr(config, "weight_shape", None))
        except UnsupportedError as error:
            return False, str(error)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the layer's weights, which then share the storage of its parameters.

        To reload, vLLM fills new parameters, has them processed here and copies them into the old ones, whose
        addresses CUDA graphs hold. `into` writes to the same addresses, so the copy finds its own values there.

        Raises:
            UnsupportedError: nothing serves the layer's shape. The sentence names the layer.
        """
        names = self.parameter_names(layer)
        tensors: dict[str, torch.Tensor] = {}
        for argument, name in names.items():
            if (parameter := getattr(layer, name, None)) is not None:
                tensors[argument] = parameter.detach()
        held = {argument: tensor.data_ptr() for argument, tensor in tensors.items()}
        tensors["weight"] = self.as_stored(tensors["weight"])
        scheme, rows = self.scheme(), [tensors["weight"].shape[0]]
        if (scales := layer.__dict__.pop(PROJECTION_SCALES, None)) is not None:
            tensors["global_scale" if scheme.weight.global_scale else "scale"] = scales
            rows = projection_rows(layer)
        earlier: LinearWeights | None = getattr(layer, PREPARED, None)
        try:
            prepared = prepare_projections(scheme, rows, **tensors, into=earlier)
        except UnsupportedError as error:
            raise UnsupportedError(f"{_name(layer)}: {error}") from error
        if earlier is None:
            setattr(layer, PREPARED, prepared)
            # An input scale may have no place in the scheme served.
            kept = {name: tensor for name in tensors if (tensor := getattr(prepared, name)) is not None}
            self.moved = [argument for argument, tensor in kept.items() if tensor.data_ptr() != held[argument]]
        for argument in self.moved:
            tensor: torch.Tensor = getattr(prepared, argument)
            replace_parameter(layer, names[argument], self.as_stored(tensor) if argument == "weight" else tensor)
        logger.info_once("b12x serves linear layers as %s", prepared.scheme.name)
        warmup.attach(layer, "linear", (prepared.scheme.name, prepared.n, prepared.k), _dummy_call(prepared))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """From x (..., K) to (..., N). Where the scheme has quantized activations, the op quantizes x."""
        weights: LinearWeights = getattr(layer, PREPARED)
        return linear(x, weights if bias is None else replace(weights, bias=bias))

    def scheme(self) -> Scheme:
        """The checkpoint's scheme for this layer."""
        return self.scheme_of(self.config)

    def parameter_names(self, layer: torch.nn.Module) -> Mapping[str, str]:
        """`parameters` of this layer."""
        del layer
        return self.parameters

    def as_stored(self, weight: torch.Tensor) -> torch.Tensor:
        """Between the layer's weight parameter and a weight (N, K): a view, and its own inverse."""
        return weight


class _Fp8Kernel(LinearKernel):
    """What the FP8 kinds share: a configuration that names both formats, and what vLLM calls the parameters."""

    @classmethod
    def scheme_of(cls, config: FP8ScaledMMLinearLayerConfig) -> Scheme:
        """See `LinearKernel.scheme_of`."""
        weight, activation = config.weight_quant_key.scale, config.activation_quant_key.scale
        formats = _FP8_WEIGHTS.get(weight.group_shape), _FP8_ACTIVATIONS.get(activation.group_shape)
        for scheme in SCHEMES.values():
            if formats == (scheme.weight, scheme.activation) and (formats[1] == FP8_TENSOR or not activation.static):
                return scheme
        raise UnsupportedError(f"serves no FP8 weights with scale {weight} beside FP8 activations with {activation}")

    def parameter_names(self, layer: torch.nn.Module) -> Mapping[str, str]:
        """`parameters` of this layer: block scales are called weight_scale_inv by Fp8, weight_scale by others."""
        scale = "weight_scale" if getattr(layer, "weight_scale_inv", None) is None else "weight_scale_inv"
        return {"weight": "weight", "scale": scale, "input_scale": "input_scale"}

    def as_stored(self, weight: torch.Tensor) -> torch.Tensor:
        """See `LinearKernel.as_stored`: vLLM hands weights over as (K, N), but block-scaled ones as (N, K)."""
        return weight if self.scheme().weight == FP8_BLOCK else weight.t()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """See `LinearKernel.process_weights_after_loading`.

        Raises:
            UnsupportedError: also where vLLM's loader has lost block scales. It lays those of fused projections on one
                grid of 128 rows, and drops or overwrites some where a projection starts between its lines.
        """
        if isinstance(getattr(layer, self.parameter_names(layer)["scale"]), BlockQuantScaleParameter):
            ranks = int(getattr(layer, "tp_size", 1))
            if lost := lost_block_scales("vLLM", projection_rows(layer), ranks):
                raise UnsupportedError(f"{_name(layer)}: {lost}")
        super().process_weights_after_loading(layer)

    # What vLLM's base classes call once they have quantized x. `apply_weights` takes their place and calls neither.

    def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
        """Not called."""
        raise NotImplementedError

    def apply_block_scaled_mm(self, *_: Any, **__: Any) -> torch.Tensor:
        """Not called."""
        raise NotImplementedError


class B12xFp8Linear(_Fp8Kernel, FP8ScaledMMLinearKernel):
    """FP8 with a scale a tensor or an output row; activations with a scale a tensor, static or not, or a token."""

    probe = Scheme(FP8_TENSOR, FP8_TENSOR)


class B12xFp8BlockLinear(_Fp8Kernel, Fp8BlockScaledMMLinearKernel):
    """FP8 with a scale a block of 128 x 128; activations with one a token and 128 columns."""

    probe = Scheme(FP8_BLOCK, FP8_GROUP)


class B12xFp8W8A16Linear(_Fp8Kernel, FP8ScaledMMLinearKernel):
    """FP8 weights beside 16-bit activations."""

    probe = Scheme(FP8_ROW, BF16)

    @classmethod
    def scheme_of(cls, config: FP8ScaledMMLinearLayerConfig) -> Scheme:
        """See `LinearKernel.scheme_of`.

        The activation key is a filler. The weight key changes while vLLM loads: it widens tensor scales to row scales.
        """
        shape = config.weight_quant_key.scale.group_shape
        if shape not in _FP8_WEIGHTS:
            raise UnsupportedError(f"serves no FP8 weights with scale {config.weight_quant_key.scale}")
        return Scheme(_FP8_WEIGHTS[shape], BF16)


class B12xMxFp8Linear(LinearKernel, Mxfp8LinearKernel):
    """MXFP8 weights beside MXFP8 or 16-bit activations.

    Attributes:
        weight_only: the checkpoint leaves activations in 16 bits, which the configuration cannot say: see `checkpoint`.
    """

    probe = Scheme(MXFP8, MXFP8)
    weight_only = False

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> Answer:
        """See `LinearKernel.can_implement`."""
        if c.bmm_batch_size is not None:
            return False, "serves matrices, not batches of them"
        return super().can_implement(c)

    def scheme(self) -> Scheme:
        """See `LinearKernel.scheme`."""
        return Scheme(MXFP8, BF16) if self.weight_only else self.probe


class B12xNvFp4Linear(LinearKernel, NvFp4LinearKernel):
    """NVFP4 weights and activations."""

    probe = Scheme(NVFP4, NVFP4)
    parameters: ClassVar[Mapping[str, str]] = {
        **LinearKernel.parameters,
        "global_scale": "weight_global_scale",
        "input_scale": "input_global_scale",
    }


class B12xNvFp4W4A16Linear(B12xNvFp4Linear):
    """NVFP4 weights beside 16-bit activations."""

    probe = Scheme(NVFP4, BF16)


class B12xMxFp4Linear(LinearKernel, MxFp4LinearKernel):
    """MXFP4 weights beside MXFP4, MXFP8, FP8 or 16-bit activations."""

    probe = Scheme(MXFP4, BF16)
    activations: ClassVar[Mapping[QuantKey | None, Format]] = {
        None: BF16,
        kMxfp4Dynamic: MXFP4,
        kMxfp8Dynamic: MXFP8,
        kFp8DynamicTokenSym: FP8_ROW,
    }

    @classmethod
    def _supports_quant_scheme(cls, weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return weight_key == kMxfp4Static and activation_key in cls.activations

    @classmethod
    def scheme_of(cls, config: MxFp4LinearLayerConfig) -> Scheme:
        """See `LinearKernel.scheme_of`."""
        key = config.activation_quant_key
        if key not in cls.activations:
            raise UnsupportedError(f"serves no activations {key} beside MXFP4 weights")
        return Scheme(MXFP4, cls.activations[key])


_FP8_WEIGHTS: Mapping[GroupShape, Format] = {
    GroupShape.PER_TENSOR: FP8_TENSOR,
    GroupShape.PER_CHANNEL: FP8_ROW,
    # ModelOpt's name for a scale an output row
    GroupShape.PER_TOKEN: FP8_ROW,
    GroupShape(128, 128): FP8_BLOCK,
}
_FP8_ACTIVATIONS: Mapping[GroupShape, Format] = {
    GroupShape.PER_TENSOR: FP8_TENSOR,
    GroupShape.PER_TOKEN: FP8_ROW,
    GroupShape(1, 128): FP8_GROUP,
}


def _name(layer: torch.nn.Module) -> str:
    """A layer in a sentence."""
    return getattr(layer, "prefix", "") or type(layer).__name__


def _served(scheme: Scheme, weight_shape: tuple[int, int] | None = None) -> Answer:
    """What the core says about a layer on vLLM's device. Any format has a layer of 128 x 128."""
    n, k = weight_shape or (128, 128)
    support = supports_linear(serving_scheme(scheme), n, k, current_platform.device_type)
    return support.ok, support.reason


def _dummy_call(weights: LinearWeights) -> Callable[[int, torch.dtype], torch.Tensor]:
    """A call of the layer's op on zeros, for warm-up."""
    return lambda tokens, dtype: linear(
        torch.zeros(tokens, weights.k, dtype=dtype, device=weights.weight.device), weights
    )
