"""Forms of checkpoint that SGLang loads, beside those that the conformance suite has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from b12x_conformance.cases.forms import FORMS, Form
from b12x_conformance.cases.linear import LinearProblem, Shards
from b12x_conformance.checkpoints.packings import PACKINGS, Packing
from b12x_core import SCHEMES

ONE: Shards = (("o_proj", 192),)
GATE_UP: Shards = (("gate_proj", 128), ("up_proj", 128))
QKV: Shards = (("q_proj", 256), ("k_proj", 128), ("v_proj", 128))

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STATIC = {**_FP8, "strategy": "tensor", "dynamic": False}
_TOKEN = {**_FP8, "strategy": "token", "dynamic": True}
_GROUP = {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True}
_GROUP_OF_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A compressed-tensors configuration with FP8 weights."""
    group = {"targets": ["Linear"], "weights": {**_FP8, "dynamic": False, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def mixed(algorithm: str, **more: Any) -> dict[str, Any]:
    """A configuration of ModelOpt with an algorithm a layer, the same for all here."""
    layers = {
        **{f"model.layers.0.self_attn.{name}": {"quant_algo": algorithm, **more} for name, _ in QKV},
        **{f"model.layers.0.mlp.{name}": {"quant_algo": algorithm, **more} for name, _ in GATE_UP},
        "model.layers.0.o_proj": {"quant_algo": algorithm, **more},
        # What makes SGLang take the configuration for one of ModelOpt's.
        "model.layers.1.o_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": layers,
        "ignore": ["lm_head"],
    }


_MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "ignore": ["lm_head"], "kv_cache_scheme": None}
_CHANNEL = PACKINGS["compressed-fp8-channel"]
_TENSOR = PACKINGS["fp8-tensor"]
_MXFP8 = replace(PACKINGS["modelopt-mxfp8"], scale="weight_scale_inv")
_BLOCK = PACKINGS["fp8-block"]


def _form(name: str, config: Mapping[str, Any], packing: Packing, weight: str, scheme: str) -> Form:
    return Form(name, config, replace(packing, scheme=SCHEMES[scheme]), weight, (scheme,))


EXTRA = {
    form.name: form
    for form in (
        _form("modelopt-fp8", {**_MODELOPT, "quant_algo": "FP8"}, _TENSOR, "fp8-tensor", "fp8-tensor"),
        _form("w8a8-fp8", {"quant_method": "w8a8_fp8"}, _CHANNEL, "fp8-channel", "fp8-channel"),
        _form("mxfp8", {"quant_method": "mxfp8", "activation_scheme": "dynamic"}, _MXFP8, "mxfp8", "mxfp8"),
        _form(
            "compressed-fp8-tensor-token",
            compressed({"strategy": "tensor"}, _TOKEN),
            replace(_TENSOR, input_scale=None),
            "fp8-tensor",
            "fp8-tensor-token",
        ),
        _form(
            "compressed-fp8-channel-static",
            compressed({"strategy": "channel"}, _STATIC),
            replace(_CHANNEL, input_scale="input_scale"),
            "fp8-channel",
            "fp8-channel-tensor",
        ),
        _form(
            "compressed-fp8-block",
            compressed({"strategy": "block", "block_structure": [128, 128]}, _GROUP),
            replace(_BLOCK, scale="weight_scale"),
            "fp8-block",
            "fp8-block",
        ),
        _form(
            "compressed-fp8-tensor-w8a16",
            compressed({"strategy": "tensor"}, None),
            replace(_TENSOR, input_scale=None),
            "fp8-tensor",
            "fp8-tensor-w8a16",
        ),
        _form(
            "compressed-fp8-channel-w8a16",
            compressed({"strategy": "channel"}, None),
            _CHANNEL,
            "fp8-channel",
            "fp8-channel-w8a16",
        ),
        _form(
            "compressed-mxfp8",
            compressed(_GROUP_OF_32, {**_FP8, **_GROUP_OF_32, "dynamic": True}),
            replace(_MXFP8, scale="weight_scale"),
            "mxfp8",
            "mxfp8",
        ),
        _form(
            "compressed-mxfp8-w8a16",
            compressed(_GROUP_OF_32, None),
            replace(_MXFP8, scale="weight_scale"),
            "mxfp8",
            "mxfp8-w8a16",
        ),
        _form("mixed-fp8", mixed("FP8"), _TENSOR, "fp8-tensor", "fp8-tensor"),
        _form("mixed-fp8-block", mixed("FP8_PB_WO", group_size=128), _BLOCK, "fp8-block", "fp8-block"),
        _form("mixed-mxfp8", mixed("MXFP8"), _MXFP8, "mxfp8", "mxfp8"),
        _form("mixed-nvfp4", mixed("NVFP4", group_size=16), PACKINGS["modelopt-nvfp4"], "nvfp4", "nvfp4-w4a4"),
        _form(
            "mixed-nvfp4-w4a16",
            mixed("W4A16_NVFP4", group_size=16),
            PACKINGS["modelopt-nvfp4-w4a16"],
            "nvfp4",
            "nvfp4-w4a16",
        ),
    )
}
"""Forms that the suite leaves out, by name."""

LOADED = {
    **{name: form for name, form in FORMS.items() if form.weight is not None and name != "gpt-oss-mxfp4"},
    **EXTRA,
}
"""Every form whose linear layers SGLang loads quantized."""

_BY_ROW = {
    "fp8-tensor": "fp8-channel-tensor",
    "fp8-tensor-token": "fp8-channel",
    "fp8-tensor-w8a16": "fp8-channel-w8a16",
}


@dataclass(frozen=True)
class Problem(LinearProblem):
    """A problem in any of `LOADED`."""

    @property
    def stored(self) -> Form:
        """The form of checkpoint."""
        return LOADED[self.form]

    @property
    def scheme(self) -> str:
        """What must serve it: the checkpoint's scheme, with one scale a row where fused projections have one each."""
        own = "fp8-tensor-token" if self.form == "fp8-tensor-dynamic" else self.stored.schemes[0]
        return _BY_ROW.get(own, own) if len(self.shards) > 1 else own


def problem(form: str, shards: Shards, k: int = 256, seed: int = 0, **more: Any) -> Problem:
    """A layer of a form; another seed draws other weights for it."""
    return Problem(f"{form}-{len(shards)}-{seed}", form, shards, k, head_size=64, **more)
