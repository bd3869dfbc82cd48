"""SmolLM2 quantized to each downloadable format, as exporters of those formats write it.

Embeddings and lm_head stay in BF16, as published checkpoints leave them. Projections that an engine fuses (q, k, v;
gate, up) see the same input and get one weight scale where the format has a scale for a whole matrix: exporters do
so because kernels want it. `unequal=True` gives each its own, which is allowed in the format and has been a source of
silent errors.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from b12x_core import formats
from rich.progress import track
from safetensors.torch import load_file, save_file

from b12x_conformance import data
from b12x_conformance.checkpoints import cache, packings, smollm2
from b12x_conformance.checkpoints.packings import PACKINGS, Packing
from b12x_conformance.oracle import codecs, quantize

KINDS = (
    "modelopt-nvfp4",
    "modelopt-nvfp4-w4a16",
    "modelopt-mxfp8",
    "compressed-nvfp4",
    "compressed-mxfp4",
    "compressed-fp8-channel",
    "compressed-fp8-tensor",
    "fp8-block",
    "fp8-tensor",
)
"""The formats that SmolLM2 comes in."""

MODULES = (sys.modules[__name__], packings, quantize, codecs)
"""Modules whose source determines a quantized checkpoint."""

CALIBRATION_TOKENS = 256

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_LARGEST_PRODUCT = {formats.NVFP4: 6.0 * 448.0, formats.FP8_TENSOR: 448.0}


def smollm2_quantized(kind: str, *, unequal: bool = False) -> Path:
    """The folder with SmolLM2 in one of `KINDS`.

    Args:
        kind: name of the format.
        unequal: each fused projection has its own global or tensor scale.
    """
    source = smollm2.bf16()
    recipe = {"source": source.name, "kind": kind, "unequal": unequal}
    name = f"smollm2-{kind}{'-unequal' if unequal else ''}"

    def build(folder: Path) -> None:
        layers = range(json.loads((source / "config.json").read_text())["num_hidden_layers"])
        # Engines fuse q, k, v along N, and 576 rows of q do not end at a block of 128: such a layer cannot be stored in
        # blocks, so it is left in BF16, by name, as published block-FP8 checkpoints list the layers that they leave.
        projections = ("q_proj", "k_proj", "v_proj") if kind == "fp8-block" else ()
        left = [f"model.layers.{layer}.self_attn.{projection}" for layer in layers for projection in projections]
        quantize_folder(source, folder, kind, ignore=("lm_head", *left), unequal=unequal)

    return cache.folder(name, recipe, build, modules=MODULES)


def quantize_folder(
    source: Path,
    target: Path,
    kind: str,
    *,
    ignore: Sequence[str] = ("lm_head",),
    unequal: bool = False,
) -> None:
    """Quantize the matrices of the layers of an unquantized checkpoint folder, but those that `ignore` names.

    Args:
        source: folder with config.json and model.safetensors, all weights 16-bit.
        target: existing empty folder.
        kind: name out of `packings.PACKINGS`.
        ignore: modules left out, as the configuration lists them: names, or patterns with * where the format has them.
        unequal: each projection of a fused group has its own global or tensor scale.
    """
    packing = PACKINGS[kind]
    tensors = load_file(source / "model.safetensors")
    modules = [
        module
        for module in (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
        if ".layers." in module
        and not any(fnmatch(module, pattern) for pattern in ignore)
        and tensors[f"{module}.weight"].dim() == 2
    ]
    static = packing.input_scale is not None
    amax = _calibrate(source, modules) if static else {}
    for group in track(_groups(modules, unequal), description=f"Quantizing to {kind}", console=cache.console):
        weights = {module: tensors.pop(f"{module}.weight") for module in group}
        tensors |= _quantize_group(packing, weights, amax)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert packing.config is not None
    write_config(source, target, {"quantization_config": packing.config(ignore)})


def write_config(source: Path, target: Path, changes: Mapping[str, Any]) -> None:
    """Copy everything of `source` but the weights to `target`, with changes of config.json."""
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _groups(modules: Sequence[str], unequal: bool) -> list[list[str]]:
    """The modules that share a scale: the projections of a fused layer, or each by itself."""
    if unequal:
        return [[module] for module in modules]
    groups: dict[tuple[str, Any], list[str]] = {}
    for module in modules:
        parent, _, projection = module.rpartition(".")
        fused = next((names for names in _FUSED if projection in names), projection)
        groups.setdefault((parent, fused), []).append(module)
    return list(groups.values())


def _quantize_group(
    packing: Packing, weights: Mapping[str, torch.Tensor], amax: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    format = packing.scheme.weight
    name = "fp8-channel" if format == formats.FP8_ROW else format.name
    # With a scale for a whole matrix, a group is quantized as the one matrix that the engine will make of it.
    whole = format in _LARGEST_PRODUCT
    parts = [torch.cat(list(weights.values()))] if whole else list(weights.values())
    quantized = [quantize.quantize_weight(part, name) for part in parts]
    stored: dict[str, torch.Tensor] = {}
    first_row = 0
    for index, (module, weight) in enumerate(weights.items()):
        q = quantized[0 if whole else index]
        rows = slice(first_row, first_row + weight.shape[0]) if whole else slice(None)
        first_row += weight.shape[0]
        scale = q.scale if format == formats.FP8_TENSOR else q.scale[rows]
        input_scale = None
        if module in amax:
            input_scale = torch.tensor(amax[module] / _LARGEST_PRODUCT[packing.scheme.activation])
        written = packing.write(q.data[rows], scale, q.global_scale, input_scale)
        # Copies: the projections of a group must not share storage in the file.
        stored |= {f"{module}.{tensor}": value.clone() for tensor, value in written.items()}
    return stored


def _calibrate(source: Path, modules: Sequence[str]) -> dict[str, float]:
    """Largest magnitude at the input of each module, over the first tokens of the fixed text.

    The experts of a layer share theirs: a short text does not reach every expert, and engines keep one scale a layer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from b12x_conformance import intercept

    amax: dict[str, float] = {}

    def record(name: str, x: torch.Tensor) -> torch.Tensor:
        layer = _layer_wide(name)
        amax[layer] = max(amax.get(layer, 0.0), x.abs().max().item())
        return x

    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, experts_implementation=intercept.IMPLEMENTATION
    )
    intercept.intercept(model, record)
    tokens = AutoTokenizer.from_pretrained(source)(data.text(), return_tensors="pt").input_ids
    model(tokens[:, :CALIBRATION_TOKENS])
    return {module: amax[_layer_wide(intercept.observed_name(module))] for module in modules}


def _layer_wide(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)
