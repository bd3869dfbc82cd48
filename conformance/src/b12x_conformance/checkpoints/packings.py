"""How a downloadable checkpoint stores a quantized linear layer: names of its tensors and its `quantization_config`.

The same table writes the checkpoints of this package and reads any checkpoint for the truth and for the adapter
`core`. It deals in stored tensors only; what their bytes mean is left to whoever dequantizes them.

Sources: configuration files published with ModelOpt, llm-compressor (compressed-tensors), DeepSeek and gpt-oss models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from b12x_core import formats
from b12x_core.errors import UnsupportedError
from b12x_core.formats import SCHEMES, Format, Scheme

QuantizationConfig = Mapping[str, Any]


@dataclass(frozen=True)
class StoredLinear:
    """One projection as stored, its scales as multipliers.

    Attributes:
        scheme: formats of weight and activation.
        weight: (N, K), or uint8 (N, K / 2) for e2m1.
        scale: as stored, None for an unquantized weight.
        global_scale: nvfp4: float32 multiplier ().
        input_scale: static scale of the activation: float32 multiplier (), None where there is none.
        bias: (N,) or None.
    """

    scheme: Scheme
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """N."""
        return self.weight.shape[0]


@dataclass(frozen=True)
class Packing:
    """Tensor names of one way to store a linear layer.

    Attributes:
        scheme: formats of weight and activation.
        config: `quantization_config` given the modules left unquantized; None for what is only read.
        weight, scale, global_scale, input_scale: names after the layer's prefix; None where there is no such tensor.
        divisors: the stored global and input scales divide, as compressed-tensors has them.
    """

    scheme: Scheme
    config: Callable[[Sequence[str]], dict[str, Any]] | None = field(default=None, compare=False)
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str | None = None
    input_scale: str | None = None
    divisors: bool = False

    def write(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        input_scale: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Tensors of one layer by their names after its prefix. `global_scale` and `input_scale` are multipliers."""
        stored = {self.weight: weight, self.scale: scale}
        for name, value in ((self.global_scale, global_scale), (self.input_scale, input_scale)):
            if name is not None and value is not None:
                value = value.to(torch.float32)
                stored[name] = (1.0 / value).reshape(1) if self.divisors else value.reshape(())
        return stored

    def read(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> StoredLinear:
        """The layer `prefix`, quantized or, as the modules that a checkpoint leaves out are, not.

        Raises:
            KeyError: a tensor that the packing has is missing.
        """
        bias = tensors.get(f"{prefix}.bias")
        if f"{prefix}.{self.scale}" not in tensors:
            weight = tensors[f"{prefix}.weight"]
            return StoredLinear(SCHEMES["fp16" if weight.dtype == torch.float16 else "bf16"], weight, bias=bias)
        # A per-tensor activation scale is stored if it is static; a dynamic one leaves no trace in the checkpoint.
        optional = self.scheme.static_activation_scale is None
        scale = tensors[f"{prefix}.{self.scale}"]
        return StoredLinear(
            self.scheme,
            tensors[f"{prefix}.{self.weight}"],
            # ModelOpt's FP8_PB_WO stores (blocks of N, 1, blocks of K, 1).
            scale.flatten(2).flatten(0, 1) if scale.dim() == 4 else scale,
            self._multiplier(tensors, prefix, self.global_scale, optional=False),
            self._multiplier(tensors, prefix, self.input_scale, optional=optional),
            bias,
        )

    def _multiplier(
        self, tensors: Mapping[str, torch.Tensor], prefix: str, name: str | None, *, optional: bool
    ) -> torch.Tensor | None:
        if name is None or (optional and f"{prefix}.{name}" not in tensors):
            return None
        value = tensors[f"{prefix}.{name}"].to(torch.float32).reshape(())
        return 1.0 / value if self.divisors else value


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Callable[..., dict[str, Any]]:
    def config(ignore: Sequence[str]) -> dict[str, Any]:
        group = {
            "targets": ["Linear"],
            "format": format,
            "weights": {"type": "float", "symmetric": True, "dynamic": False, **weights},
            "input_activations": None if inputs is None else {"type": "float", "symmetric": True, **inputs},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "ignore": [f"re:{name.replace('.', '[.]').replace('*', '.*')}$" for name in ignore],
            "config_groups": {"group_0": group},
        }

    return config


def _modelopt(algorithm: str, **extra: Any) -> Callable[..., dict[str, Any]]:
    def config(ignore: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "kv_cache_scheme": None,
            "ignore": list(ignore),
            "producer": {"name": "modelopt"},
            **extra,
        }

    return config


def _fp8(activation_scheme: str, block: list[int] | None = None) -> Callable[..., dict[str, Any]]:
    def config(ignore: Sequence[str]) -> dict[str, Any]:
        written: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": activation_scheme,
            "modules_to_not_convert": list(ignore),
        }
        return written | ({"weight_block_size": block} if block else {})

    return config


_MODELOPT_FP4: dict[str, Any] = {"global_scale": "weight_scale_2"}
_COMPRESSED_FP4: dict[str, Any] = {"weight": "weight_packed", "global_scale": "weight_global_scale", "divisors": True}
_FP4_GROUP = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_MX_GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

PACKINGS: dict[str, Packing] = {
    "modelopt-nvfp4": Packing(
        SCHEMES["nvfp4-w4a4"], _modelopt("NVFP4", group_size=16), input_scale="input_scale", **_MODELOPT_FP4
    ),
    "modelopt-nvfp4-w4a16": Packing(SCHEMES["nvfp4-w4a16"], _modelopt("W4A16_NVFP4", group_size=16), **_MODELOPT_FP4),
    "modelopt-mxfp8": Packing(SCHEMES["mxfp8"], _modelopt("MXFP8", group_size=32)),
    "compressed-nvfp4": Packing(
        SCHEMES["nvfp4-w4a4"],
        _compressed("nvfp4-pack-quantized", _FP4_GROUP, {**_FP4_GROUP, "dynamic": "local"}),
        input_scale="input_global_scale",
        **_COMPRESSED_FP4,
    ),
    "compressed-mxfp4": Packing(
        SCHEMES["mxfp4-w4a4"],
        _compressed("mxfp4-pack-quantized", _MX_GROUP, {**_MX_GROUP, "dynamic": True}),
        weight="weight_packed",
    ),
    "compressed-mxfp4-w4a16": Packing(
        SCHEMES["mxfp4-w4a16"], _compressed("mxfp4-pack-quantized", _MX_GROUP, None), weight="weight_packed"
    ),
    "compressed-fp8-channel": Packing(
        SCHEMES["fp8-channel"],
        _compressed(
            "float-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "strategy": "token", "dynamic": True},
        ),
    ),
    "compressed-fp8-tensor": Packing(
        SCHEMES["fp8-tensor"],
        _compressed(
            "float-quantized",
            {"num_bits": 8, "strategy": "tensor"},
            {"num_bits": 8, "strategy": "tensor", "dynamic": False},
        ),
        input_scale="input_scale",
    ),
    "fp8-block": Packing(SCHEMES["fp8-block"], _fp8("dynamic", [128, 128]), scale="weight_scale_inv"),
    "fp8-tensor": Packing(SCHEMES["fp8-tensor"], _fp8("static"), input_scale="input_scale"),
}
"""The packings that checkpoints are written in, by the name of the checkpoint kind."""


def parse(config: QuantizationConfig | None) -> Packing:
    """The packing that a `quantization_config` describes. None: an unquantized checkpoint.

    Raises:
        UnsupportedError: a method or algorithm that is none of the formats of `b12x_core.formats`.
    """
    if config is None:
        return Packing(SCHEMES["bf16"])
    readers: dict[str, Callable[[QuantizationConfig], Packing]] = {
        "modelopt": _parse_modelopt,
        "modelopt_fp4": _parse_modelopt,
        "compressed-tensors": _parse_compressed,
        "fp8": _parse_fp8,
        "mxfp8": lambda _: PACKINGS["modelopt-mxfp8"],
        # gpt-oss: experts only, weights only. `experts.read` knows the names of its fused tensors.
        "mxfp4": lambda _: Packing(SCHEMES["mxfp4-w4a16"]),
    }
    method = str(config.get("quant_method", "")).lower()
    if method not in readers:
        raise UnsupportedError(f"quantization_config: quant_method must be one of {', '.join(readers)}; got {method!r}")
    return readers[method](config)


def _parse_modelopt(config: QuantizationConfig) -> Packing:
    config = config.get("quantization", config)
    known = {
        "NVFP4": PACKINGS["modelopt-nvfp4"],
        "W4A16_NVFP4": PACKINGS["modelopt-nvfp4-w4a16"],
        "MXFP8": PACKINGS["modelopt-mxfp8"],
        "FP8": PACKINGS["fp8-tensor"],
        "FP8_PER_CHANNEL_PER_TOKEN": PACKINGS["compressed-fp8-channel"],
        "FP8_PB_WO": Packing(SCHEMES["fp8-block-w8a16"]),
    }
    algorithm = str(config["quant_algo"]).upper()
    if algorithm not in known:
        raise UnsupportedError(f"quantization_config: quant_algo must be one of {', '.join(known)}; got {algorithm!r}")
    return known[algorithm]


def _parse_fp8(config: QuantizationConfig) -> Packing:
    block = config.get("weight_block_size")
    if block is not None:
        if list(block) != [128, 128]:
            raise UnsupportedError(f"quantization_config: weight_block_size must be [128, 128]; got {block}")
        return PACKINGS["fp8-block"]
    return PACKINGS["fp8-tensor"]


def _parse_compressed(config: QuantizationConfig) -> Packing:
    groups = list(config["config_groups"].values())
    if len(groups) != 1:
        raise UnsupportedError(f"quantization_config: expected one group in config_groups; got {len(groups)}")
    scheme = Scheme(_compressed_format(groups[0]["weights"]), _compressed_format(groups[0].get("input_activations")))
    if scheme.weight == formats.NVFP4:
        input_scale = "input_global_scale" if scheme.static_activation_scale else None
        return Packing(scheme, input_scale=input_scale, **_COMPRESSED_FP4)
    if scheme.weight == formats.MXFP4:
        return Packing(scheme, weight="weight_packed")
    static = scheme.static_activation_scale is None and not groups[0]["input_activations"].get("dynamic")
    return Packing(scheme, input_scale="input_scale" if static else None)


_COMPRESSED_FORMATS: dict[tuple[int, str, int | None], Format] = {
    (4, "tensor_group", 16): formats.NVFP4,
    (4, "group", 32): formats.MXFP4,
    (8, "group", 32): formats.MXFP8,
    (8, "group", 128): formats.FP8_GROUP,
    (8, "block", None): formats.FP8_BLOCK,
    (8, "tensor", None): formats.FP8_TENSOR,
    (8, "channel", None): formats.FP8_ROW,
    (8, "token", None): formats.FP8_ROW,
}


def _compressed_format(arguments: Mapping[str, Any] | None) -> Format:
    """The format of the weights or the input activations of a group; 16 bits where there are no arguments."""
    if arguments is None:
        return formats.BF16
    key = (arguments.get("num_bits"), arguments.get("strategy"), arguments.get("group_size"))
    if arguments.get("type") != "float" or key not in _COMPRESSED_FORMATS:
        raise UnsupportedError(
            f"quantization_config: expected float weights or activations with (num_bits, strategy, group_size) out of "
            f"{', '.join(map(str, _COMPRESSED_FORMATS))}; got type {arguments.get('type')!r} with {key}"
        )
    return _COMPRESSED_FORMATS[key]
