"""The toy engine: a model of transformers with other layers in it, and transformers' own `generate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from b12x_core import SILU, UnsupportedError
from b12x_core.adapters import Generation, TextEngineOptions
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.initialization import no_init_weights

from b12x_toy.checkpoint import Packing, Tensors, load_experts, load_linear, packing_of
from b12x_toy.layers import ATTENTION, KV_DTYPES, PAGE_SIZE, Experts, Linear, Pages

CANDIDATES = 5


class ToyEngine:
    """A checkpoint folder, served.

    Args:
        folder: with config.json and model.safetensors.
        options: see `TextEngineOptions`.
    """

    def __init__(self, folder: str, options: TextEngineOptions) -> None:
        self._options = options
        self._model = load(Path(folder), options)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generation]:
        """Continue the prompts greedily, one after the other."""
        return [self._continue(prompt, max_tokens) for prompt in prompts]

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, given those before it."""
        cache = self._cache()
        tokens = torch.tensor([token_ids], device=self._options.device)
        chunks = tokens[:, :-1].split(self._options.max_num_batched_tokens or tokens.shape[1], dim=1)
        logits = torch.cat([self._model(chunk, cache=cache).logits[0] for chunk in chunks])
        scores: list[float] = logits.float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].tolist()
        return scores

    def close(self) -> None:
        """Free the model."""
        del self._model

    def _continue(self, prompt: Sequence[int], max_tokens: int) -> Generation:
        tokens = torch.tensor([prompt], device=self._options.device)
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),  # a token that may pad is an ordinary token here
            cache=self._cache(),
            do_sample=False,
            max_new_tokens=max_tokens,
            prefill_chunk_size=self._options.max_num_batched_tokens,
            prompt_lookup_num_tokens=self._options.speculative_tokens or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(output.logits).float().log_softmax(-1).topk(CANDIDATES)
        candidates = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Generation(
            tuple(output.sequences[0, len(prompt) :].tolist()),
            tuple(dict(zip(ids, logprobs, strict=True)) for ids, logprobs in candidates),
        )

    def _cache(self) -> Cache:
        """Empty pages for one sequence."""
        num_pages = -(-self._options.max_model_len // PAGE_SIZE)
        dtype = KV_DTYPES[self._options.kv_dtype]
        return Cache(layer_class_to_replicate=lambda: Pages(num_pages, PAGE_SIZE, dtype))


def load(folder: Path, options: TextEngineOptions) -> PreTrainedModel:
    """The model of a checkpoint, with layers of the toy engine where the checkpoint is quantized.

    Raises:
        UnsupportedError: a checkpoint that the toy engine does not read.
    """
    config = AutoConfig.from_pretrained(folder)
    # Without its quantization, transformers makes the model as an unquantized one.
    packing = packing_of(config.__dict__.pop("quantization_config", None))
    with no_init_weights(), torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype, attn_implementation=ATTENTION)
    model.generation_config.eos_token_id = None
    stored = load_file(folder / "model.safetensors", device=options.device)
    # Checkpoints of Mixtral have a name that transformers has given up.
    tensors = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in stored.items()}
    quantized = {name.removesuffix(f".{packing.scale}") for name in tensors if name.endswith(f".{packing.scale}")}
    modules = dict(model.named_modules())
    for place in sorted({re.sub(r"\.experts\..*", ".experts", name) for name in quantized}):
        model.set_submodule(place, _replacement(modules.get(place), place, packing, tensors))
    rest = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in quantized}
    missing, unexpected = model.load_state_dict(rest, strict=False)
    if unexpected or set(missing) - set(model.all_tied_weights_keys):
        raise UnsupportedError(f"the toy engine finds no place for {unexpected}, and nothing to load into {missing}")
    model.tie_weights()
    return model.eval()


def _replacement(module: Any, place: str, packing: Packing, tensors: Tensors) -> nn.Module:
    """What takes the place of a module of transformers."""
    if isinstance(module, nn.Linear):
        return Linear(load_linear(packing, tensors, [place]))
    if isinstance(getattr(module, "act_fn", None), SiLUActivation):
        experts = [f"{place}.{number}" for number in range(module.num_experts)]
        return Experts(load_experts(packing, tensors, experts), SILU)
    raise UnsupportedError(f"the toy engine has linear layers and experts with SiLU; {place} is neither")
