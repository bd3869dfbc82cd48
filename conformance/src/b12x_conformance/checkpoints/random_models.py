"""Small random models with the shapes that are hard in large ones: cut in layers, width and vocabulary.

Weights are scaled so that a wrong op shows in the text: keys stand out enough for attention to choose among them, every
layer moves the residual, and the logits spread by `LOGIT_SPREAD`, so that the likeliest token rarely has a rival.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from b12x_conformance.checkpoints import cache, quantized
from b12x_conformance.oracle import quantize

LOGIT_SPREAD = 4.0
"""Standard deviation of the logits."""

VOCABULARY = 1024

_GAINS = {
    "lm_head": LOGIT_SPREAD,
    "q_proj": 1.5,
    "k_proj": 1.5,
    "o_proj": 2.0,
    "down_proj": 2.0,
    # Decided routers: the last expert chosen has a small weight, so it matters little if rounding chooses another one.
    "mlp.gate.": 4.0,
    "router.": 4.0,
}
"""Standard deviation of the output of a projection whose inputs have one of 1, where it is not 1."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class RandomModel:
    """A random model.

    Attributes:
        name: of the checkpoint folder.
        model_class: class of transformers, "Qwen3MoeForCausalLM"; its configuration class has the matching name.
        config: arguments of the configuration.
        kind: format out of `packings.PACKINGS`, "gpt-oss" for MXFP4 experts in the layout of gpt-oss, or "bf16".
        ignore: modules left unquantized.
    """

    name: str
    model_class: str
    config: dict[str, Any]
    kind: str
    ignore: tuple[str, ...] = ("lm_head",)


MODELS = {
    model.name: model
    for model in (
        # gpt-oss-20b: 1440 is no multiple of 128 either; group 8, window, sinks, biases, interleaved gate and up.
        RandomModel(
            "gpt-oss",
            "GptOssForCausalLM",
            {
                "hidden_size": 1440,
                "intermediate_size": 1440,
                "num_hidden_layers": 2,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "sliding_window": 128,
            },
            "gpt-oss",
        ),
        # Qwen3-30B-A3B: small experts, head dim 128, group 8.
        RandomModel(
            "qwen3-moe",
            "Qwen3MoeForCausalLM",
            {
                "hidden_size": 512,
                "intermediate_size": 512,
                "moe_intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 128,
            },
            "modelopt-nvfp4-w4a16",
            ("lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"),
        ),
        # Head dim 256, group 8, window, soft cap and a softmax scale that is not head_dim ** -0.5.
        RandomModel(
            "gemma2",
            "Gemma2ForCausalLM",
            {
                "hidden_size": 576,
                "intermediate_size": 960,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "sliding_window": 96,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": 144,
                # Published configurations have it beside hidden_activation, and SGLang reads both.
                "hidden_act": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
            },
            "modelopt-nvfp4-w4a16",
        ),
        # Nemotron-3-Nano: 928 is 7.25 * 128, relu2, not gated; the Mamba layers are none of our business.
        RandomModel(
            "nemotron",
            "NemotronHForCausalLM",
            {
                "hidden_size": 672,
                "layers_block_type": ["moe", "full_attention", "moe", "full_attention"],
                "moe_intermediate_size": 464,
                "moe_shared_expert_intermediate_size": 448,
                "intermediate_size": 448,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_shared_experts": 1,
                "routed_scaling_factor": 2.5,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 128,
                "mamba_num_heads": 8,
                "n_groups": 1,
            },
            "modelopt-nvfp4-w4a16",
            ("lm_head", "backbone.layers.0.mixer.gate", "backbone.layers.2.mixer.gate"),
        ),
    )
}
"""The random models by name."""


def random_model(name: str, seed: int = 0) -> Path:
    """The folder of one of `MODELS`."""
    model = MODELS[name]
    recipe = {"model": repr(model), "seed": seed}
    modules = (sys.modules[__name__], *quantized.MODULES)

    def build(folder: Path) -> None:
        if model.kind in ("bf16", "gpt-oss"):
            _unquantized(model, seed, folder)
            if model.kind == "gpt-oss":
                _pack_gpt_oss(folder)
            return
        source = cache.folder(
            f"random-{name}-bf16", recipe, lambda empty: _unquantized(model, seed, empty), modules=modules
        )
        quantized.quantize_folder(source, folder, model.kind, ignore=model.ignore)

    return cache.folder(f"random-{name}-{model.kind}", recipe, build, modules=modules)


def random_prompts(lengths: tuple[int, ...] = (5, 33, 150, 200, 260), seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, by default on both sides of every window above."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def _unquantized(model: RandomModel, seed: int, folder: Path) -> None:
    import transformers

    model_class = getattr(transformers, model.model_class)
    instance = model_class(model_class.config_class(**(_COMMON | model.config))).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in instance.named_parameters():
        # The experts of gpt-oss have the reduced dimension first, unlike all others.
        first = model.kind == "gpt-oss" and parameter.dim() == 3
        parameter.copy_(_weight(name, parameter, parameter.shape[-2 if first else -1], generator))
    if instance.config.tie_word_embeddings:
        _untie(instance, generator)
    for name, buffer in instance.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    instance.save_pretrained(folder)
    if "layers_block_type" in model.config:
        _write_pattern(folder, model.config["layers_block_type"])


def _write_pattern(folder: Path, kinds: Sequence[str]) -> None:
    """Spell the kinds of layers as published checkpoints do: engines do not know the names of transformers."""
    letters = {"moe": "E", "full_attention": "*"}
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in ("layers_block_type", "mtp_layers_block_type"):
        config.pop(name, None)
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _untie(model: Any, generator: torch.Generator) -> None:
    """Keep a model whose embedding is also its head, and whose norms multiply with 1 + weight, from repeating itself.

    What is in the residual of a token's own embedding would point at that token. Random signs in the last norm hide it.
    """
    hidden = model.config.hidden_size
    model.lm_head.weight.mul_(LOGIT_SPREAD / math.sqrt(hidden))
    model.model.norm.weight.copy_(torch.randint(0, 2, (hidden,), generator=generator) * 2.0 - 2.0)
    for layer in model.model.layers:
        # The scaled embedding enters with a magnitude of LOGIT_SPREAD; the layers are to move it.
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.weight.add_(LOGIT_SPREAD - 1)


def _weight(name: str, parameter: torch.Tensor, fan_in: int, generator: torch.Generator) -> torch.Tensor:
    """Random values for a parameter, by its role."""
    normal = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        return parameter + 0.1 * normal
    if "embed" in name:
        return normal
    if name.endswith("sinks"):
        return normal
    if name.endswith("bias"):
        # Larger ones would say the same thing at every position, whatever the input.
        return 0.3 * normal
    gain = next((value for part, value in _GAINS.items() if part in name), 1.0)
    return normal * (gain / math.sqrt(fan_in))


def _pack_gpt_oss(folder: Path) -> None:
    """Store the experts of an unquantized gpt-oss folder as MXFP4, in the layout that OpenAI published."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        packed = quantize.quantize_weight(tensors.pop(name).transpose(-1, -2), "mxfp4")
        tensors[f"{name}_blocks"] = packed.data.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = packed.scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads(path.read_text()) | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left}
    }
    path.write_text(json.dumps(config, indent=2) + "\n")
