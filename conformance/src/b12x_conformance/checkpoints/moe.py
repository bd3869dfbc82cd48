"""SmolLM2 turned into a mixture of experts that says exactly what the dense model says.

The intermediate of each MLP is split over E experts: expert e holds a run of rows of gate and up and the same columns
of down. The router's weight is zero and top-k is E, so every expert gets the weight 1 / E, which is taken back by a
factor E in down; E is a power of two, so that costs nothing in any format. The sum over experts is then the dense MLP.

The carrier is Mixtral: its attention is Llama's, and it renormalizes the routed weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from b12x_conformance.checkpoints import cache, quantized, smollm2

KINDS = (
    "bf16",
    "modelopt-nvfp4",
    "modelopt-nvfp4-w4a16",
    "compressed-mxfp4",
    "compressed-mxfp4-w4a16",
    "fp8-block",
    "fp8-tensor",
)
"""The formats that the mixture of experts comes in."""

EXPERTS = {"fp8-block": 4}
"""Experts by format, else 8. Blocks of 128 rows want an intermediate of 384 (1536 / 4), not 192."""

_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def smollm2_moe(kind: str, *, unequal: bool = False) -> Path:
    """The folder with SmolLM2 as a mixture of experts in one of `KINDS`.

    Args:
        kind: name of the format.
        unequal: gate and up projections have scales of their own.
    """
    experts = EXPERTS.get(kind, 8)
    if kind == "bf16":
        return _bf16(experts)
    source = _bf16(experts)

    def build(folder: Path) -> None:
        layers = range(json.loads((source / "config.json").read_text())["num_hidden_layers"])
        routers = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in layers]
        # Attention on 4-bit activations as well would leave little of so small a model.
        if kind == "modelopt-nvfp4-w4a16":
            attention = []
        elif kind.startswith("fp8"):
            attention = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in layers for name in "qkvo"]
        else:
            attention = ["*.self_attn.*"]
        quantized.quantize_folder(source, folder, kind, ignore=("lm_head", *routers, *attention), unequal=unequal)

    name = f"smollm2-moe{experts}-{kind}{'-unequal' if unequal else ''}"
    recipe = {"source": source.name, "kind": kind, "unequal": unequal}
    return cache.folder(name, recipe, build, modules=(sys.modules[__name__], *quantized.MODULES))


def _bf16(experts: int) -> Path:
    source = smollm2.bf16()
    recipe = {"source": source.name, "experts": experts}
    return cache.folder(
        f"smollm2-moe{experts}-bf16",
        recipe,
        lambda folder: _split(source, folder, experts),
        modules=(sys.modules[__name__],),
    )


def _split(source: Path, target: Path, experts: int) -> None:
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer, is_mlp, projection = name.removesuffix(".weight").partition(".mlp.")
        if not is_mlp:
            tensors[name] = tensor
            continue
        down = projection == "down_proj"
        parts = (tensor * experts if down else tensor).chunk(experts, dim=1 if down else 0)
        for expert, part in enumerate(parts):
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{_PROJECTIONS[projection]}.weight"] = part.contiguous()
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = torch.zeros(
            experts, config["hidden_size"], dtype=tensor.dtype
        )
    # SGLang's Mixtral does not tie its head to the embedding, whatever the configuration says.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    changes = {
        "tie_word_embeddings": False,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config["intermediate_size"] // experts,
        "num_local_experts": experts,
        "num_experts_per_tok": experts,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }
    quantized.write_config(source, target, changes)
