"""The truth about a checkpoint: its dequantized weights in transformers, in fp32.

Weights are read back by the oracle's codecs, which share nothing with the core. Where the checkpoint's scheme
quantizes activations, the same rule is applied at the input of those layers, because that is part of what the
checkpoint says. What is measured is kept on disk, so that every adapter is compared with one run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from b12x_core import formats
from rich.progress import track
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from b12x_conformance import intercept
from b12x_conformance.checkpoints import cache, packings
from b12x_conformance.checkpoints.packings import StoredLinear
from b12x_conformance.oracle import codecs, quantize

CANDIDATES = 256
"""Likeliest tokens of each step that are kept: a token outside them is nowhere near a tie."""

_RULES = {
    formats.FP8_TENSOR: "fp8-tensor",
    formats.FP8_ROW: "fp8-token",
    formats.FP8_GROUP: "fp8-group",
    formats.MXFP8: "mxfp8",
    formats.MXFP4: "mxfp4",
    formats.NVFP4: "nvfp4",
}


@dataclass(frozen=True)
class Continuation:
    """Greedy continuation of one prompt.

    Attributes:
        tokens: (n,) int64.
        candidates: (n, CANDIDATES) int64, the likeliest tokens of each step, likeliest first.
        logprobs: (n, CANDIDATES) float32, their log-probabilities. Differences of them are differences of logits.
    """

    tokens: torch.Tensor
    candidates: torch.Tensor
    logprobs: torch.Tensor

    def gap(self, step: int, token: int) -> float:
        """How far the logit of `token` lies below that of the truth's own token; infinite outside the candidates."""
        position = (self.candidates[step] == token).nonzero()
        return float(self.logprobs[step, 0] - self.logprobs[step, position[0, 0]]) if len(position) else float("inf")


@dataclass(frozen=True)
class Measured:
    """What the truth says.

    Attributes:
        continuations: of each prompt.
        scores: log-probability of every token of each passage after its first.
    """

    continuations: list[Continuation]
    scores: torch.Tensor


class Truth:
    """A quantized checkpoint folder, dequantized and loaded.

    Args:
        checkpoint: folder with config.json and model.safetensors.
        kv_dtype: "auto", or "fp8_e4m3" for keys and values rounded to e4m3 (scale 1) where they are stored.
        quantize_activations: False leaves them alone, as `B12X_FORCE_A16=1` asks an engine to do.
        dtype: of weights and arithmetic.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        kv_dtype: str = "auto",
        quantize_activations: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = _load(checkpoint, dtype, quantize_activations)
        self._kv_dtype = kv_dtype

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Continuation]:
        """Continue all prompts greedily by max_tokens, in one batch, past any end of sequence."""
        longest = max(map(len, prompts))
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        keys_and_values = self._cache()
        steps = []
        for _ in track(range(max_tokens), description="Truth: text", console=cache.console, transient=True):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            logits = self.model(
                tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=keys_and_values,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            best = logits[:, -1].float().log_softmax(-1).topk(min(CANDIDATES, logits.shape[-1]))
            tokens = best.indices[:, :1]
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            steps.append(best)
        candidates = torch.stack([step.indices for step in steps], dim=1)
        values = torch.stack([step.values for step in steps], dim=1)
        return [Continuation(ids[:, 0].clone(), ids, row) for ids, row in zip(candidates, values, strict=True)]

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probability of every token after the first, given those before it: (len(tokens) - 1,) float32."""
        ids = torch.tensor([list(tokens)])
        logits = self.model(ids, past_key_values=self._cache(), use_cache=True).logits[0, :-1]
        # In parts: softmax would otherwise double what is already the largest tensor of all.
        parts = zip(logits.split(256), ids[0, 1:].split(256), strict=True)
        return torch.cat([part.float().log_softmax(-1).gather(1, target[:, None])[:, 0] for part, target in parts])

    def _cache(self) -> DynamicCache:
        config = self.model.config
        return _Fp8Cache(config=config) if self._kv_dtype == "fp8_e4m3" else DynamicCache(config=config)


def measure(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    passages: Sequence[Sequence[int]] = (),
    *,
    kv_dtype: str = "auto",
    quantize_activations: bool = True,
) -> Measured:
    """`Truth.generate`, and `Truth.score` of some passages one after the other, of a cached checkpoint; kept on disk.

    The folder's name holds the digest of its content, so it stands for the checkpoint.
    """
    recipe = {
        "checkpoint": checkpoint.name,
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "passages": [list(passage) for passage in passages],
        "kv_dtype": kv_dtype,
        "quantize_activations": quantize_activations,
    }

    def build(folder: Path) -> None:
        truth = Truth(checkpoint, kv_dtype=kv_dtype, quantize_activations=quantize_activations)
        parts = truth.generate(prompts, max_tokens)
        tensors = {
            name: torch.stack([getattr(part, name) for part in parts]) for name in ("tokens", "candidates", "logprobs")
        }
        tensors["scores"] = torch.cat([torch.empty(0), *map(truth.score, passages)])
        save_file(tensors, folder / "measured.safetensors")

    modules = (sys.modules[__name__], intercept, packings, quantize, codecs)
    stored = load_file(
        cache.folder(f"truth-{checkpoint.name}", recipe, build, modules=modules) / "measured.safetensors"
    )
    scores = stored.pop("scores")
    return Measured(
        [Continuation(**{name: tensor[row] for name, tensor in stored.items()}) for row in range(len(prompts))], scores
    )


class _Fp8Cache(DynamicCache):  # type: ignore[misc]
    """Keys and values rounded to e4m3 when they are stored, and read back rounded, this step's own included."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(_round_to_e4m3(key_states), _round_to_e4m3(value_states), *args, **kwargs)


def _round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(codecs.round_to(codecs.to_float32(x), codecs.E4M3)).to(x.dtype)


def _load(checkpoint: Path, dtype: torch.dtype, quantize_activations: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(checkpoint)
    packing = packings.parse(getattr(config, "quantization_config", None))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tensors = load_file(checkpoint / "model.safetensors")
    weights, rules = _dequantize(tensors, packing)
    model_class = getattr(transformers, config.architectures[0])
    model: PreTrainedModel = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        # The other implementations have no soft cap and no sinks, and some versions pick one of them all the same.
        attn_implementation="eager",
        experts_implementation=intercept.IMPLEMENTATION,
    )
    model.eval()
    if rules and quantize_activations:
        intercept.intercept(model, _QuantizedInputs(rules))
    return model


_Rule = tuple[str, float | None]
"""Activation rule of the oracle, and the static scale that goes with it."""


class _QuantizedInputs:
    """Quantizes the inputs of the layers that have a rule. The last result is kept: q, k, v share their input."""

    def __init__(self, rules: Mapping[str, _Rule]) -> None:
        self._rules = rules
        self._last: tuple[torch.Tensor, _Rule, torch.Tensor] | None = None

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        rule = self._rules.get(name)
        if rule is None:
            return x
        if self._last is None or self._last[0] is not x or self._last[1] != rule:
            self._last = (x, rule, quantize.fake_quantize_activation(x, *rule).to(x.dtype))
        return self._last[2]


def _dequantize(
    tensors: Mapping[str, torch.Tensor], packing: packings.Packing
) -> tuple[dict[str, torch.Tensor], dict[str, _Rule]]:
    """Unquantized weights by the names that transformers loads, and activation rules by observed name."""
    weights: dict[str, torch.Tensor] = {}
    rules: dict[str, _Rule] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if name.endswith("_blocks"):
            scale = tensors[name.removesuffix("blocks") + "scales"]
            matrix = dequantize(StoredLinear(packing.scheme, tensor.flatten(-2), scale))
            # transformers keeps gpt-oss experts with the reduced dimension first.
            weights[name.removesuffix("_blocks")] = matrix.transpose(-1, -2).contiguous()
        elif last == packing.weight and f"{module}.{packing.scale}" in tensors:
            stored = packing.read(tensors, module)
            weights[f"{module}.weight"] = dequantize(stored)
            if stored.scheme.activation.quantized:
                static = None if stored.input_scale is None else float(stored.input_scale)
                rules[intercept.observed_name(module)] = (_RULES[stored.scheme.activation], static)
        elif tensor.dtype in (torch.bfloat16, torch.float16, torch.float32) and last not in _scales(packing):
            weights[name] = tensor
    return weights, rules


def _scales(packing: packings.Packing) -> set[str | None]:
    return {packing.scale, packing.global_scale, packing.input_scale}


def dequantize(stored: StoredLinear) -> torch.Tensor:
    """The float32 matrix (..., N, K) that a stored projection stands for."""
    if stored.scale is None:
        return stored.weight.float()
    format = "fp8-channel" if stored.scheme.weight == formats.FP8_ROW else stored.scheme.weight.name
    return quantize.dequantize(quantize.Quantized(format, stored.weight, stored.scale, stored.global_scale))
