"""The text engine of the adapter `core`: a transformers model whose linear layers, experts and attention are the ops.

Requests are batched as serving engines batch them: the tokens of a step, of however many requests, are one flat row;
prompts come in chunks; keys and values live in pages. So the ops see the shapes that an engine gives them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import b12x_core
import torch
import transformers
from b12x_core.activations import FUNCTIONS, Activation, SwiGLU
from b12x_core.adapters import Generation, TextEngineOptions
from b12x_core.errors import UnsupportedError
from b12x_core.ops.linear import LinearWeights
from b12x_core.ops.moe import ExpertWeights
from safetensors.torch import load_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from b12x_conformance import core_layers
from b12x_conformance.checkpoints import packings
from b12x_conformance.intercept import in_transformers

IMPLEMENTATION = "b12x_core"
"""Name of the attention and experts implementations below, as transformers knows them."""

PAGE_SIZE = 16
STEP_TOKENS = 1024
LOGPROBS = 20

_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass
class _Request:
    """A sequence in the making. `computed` of its tokens have their keys and values in the cache."""

    tokens: list[int]
    wanted: int
    pages: torch.Tensor
    computed: int = 0
    draft: list[int] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """What the attention of every layer needs to know about the tokens of this step."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


class CoreEngine:
    """A checkpoint folder, served.

    Args:
        checkpoint: folder with config.json and model.safetensors.
        options: see `TextEngineOptions`.
    """

    def __init__(self, checkpoint: str, options: TextEngineOptions) -> None:
        self._options = options
        self._model = load(Path(checkpoint), options.dtype, options.device)
        self._step: _Step | None = None
        self._budget = options.max_num_batched_tokens or STEP_TOKENS
        for module in self._model.modules():
            # transformers hands its attention function the module; this is how it finds the engine.
            if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups"):
                module.b12x_engine = self
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._kv_dtype = core_layers.KV_DTYPES.get(options.kv_dtype, options.dtype)
        self._pages = 0

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generation]:
        """Continue all prompts in one batch, greedily, ignoring the end-of-sequence token."""
        requests = self._admit([list(prompt) for prompt in prompts], max_tokens)
        ends = [len(prompt) for prompt in prompts]
        while waiting := [request for request in requests if len(request.tokens) < request.wanted]:
            self._advance(waiting)
        return [
            Generation(tuple(request.tokens[end:]), tuple(request.top_logprobs))
            for request, end in zip(requests, ends, strict=True)
        ]

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, given those before it."""
        (request,) = self._admit([list(token_ids)], 0)
        scores: list[float] = []
        while request.computed < len(request.tokens) - 1:
            first = request.computed
            count = min(self._budget, len(request.tokens) - 1 - first)
            logits = self._forward([(request, request.tokens[first : first + count])], torch.arange(count))
            target = torch.tensor(request.tokens[first + 1 : first + count + 1], device=logits.device)
            scores += logits.log_softmax(-1).gather(1, target[:, None])[:, 0].tolist()
            request.computed += count
        return scores

    def close(self) -> None:
        """Free the model."""
        del self._model
        self._caches.clear()

    def _admit(self, sequences: list[list[int]], max_tokens: int) -> list[_Request]:
        """Requests with pages of their own, dealt out in turn so that no request's pages are neighbours."""
        longest = max(map(len, sequences)) + max_tokens
        if longest > self._options.max_model_len:
            raise UnsupportedError(f"sequence of {longest} tokens is longer than {self._options.max_model_len}")
        pages = -(-(longest + self._options.speculative_tokens) // PAGE_SIZE)
        count = len(sequences)
        self._pages = count * pages
        self._caches.clear()
        return [
            _Request(tokens, len(tokens) + max_tokens, torch.arange(pages, dtype=torch.int32) * count + row)
            for row, tokens in enumerate(sequences)
        ]

    def _advance(self, requests: list[_Request]) -> None:
        """One step: every request computes what it can of its tokens, and gains at least one if that was all."""
        batch, budget = [], self._budget
        for request in requests:
            known = request.tokens[request.computed :]
            # A draft is verified only by a request that decodes; a prompt is still being read.
            request.draft = self._propose(request) if len(known) == 1 else []
            tokens = (known + request.draft)[:budget]
            request.draft = request.draft[: max(0, len(tokens) - len(known))]
            if tokens:
                batch.append((request, tokens))
                budget -= len(tokens)
        ends: list[int] = []
        position = 0
        for request, tokens in batch:
            position += len(tokens)
            if request.computed + len(tokens) >= len(request.tokens):
                ends += range(position - 1 - len(request.draft), position)
        logprobs = self._forward(batch, torch.tensor(ends, dtype=torch.int64)).log_softmax(-1)
        row = 0
        for request, tokens in batch:
            if request.computed + len(tokens) < len(request.tokens):
                request.computed += len(tokens)
                continue
            request.computed = len(request.tokens)
            rows = logprobs[row : row + 1 + len(request.draft)]
            row += len(rows)
            _accept(request, rows)

    def _propose(self, request: _Request) -> list[int]:
        """Prompt look-up: what followed the last time that the last two tokens occurred."""
        count = min(self._options.speculative_tokens, request.wanted - len(request.tokens) - 1)
        tokens = request.tokens
        for start in range(len(tokens) - 3, -1, -1) if count > 0 else ():
            if tokens[start : start + 2] == tokens[-2:]:
                return tokens[start + 2 : start + 2 + count]
        return []

    def _forward(self, batch: Sequence[tuple[_Request, list[int]]], rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits (len(rows), vocabulary) of some of the flat row of all tokens of the batch."""
        device = self._options.device
        lengths = [len(tokens) for _, tokens in batch]
        positions = torch.cat([torch.arange(r.computed, r.computed + len(tokens)) for r, tokens in batch])
        pages = torch.cat([r.pages[torch.arange(r.computed, r.computed + n) // PAGE_SIZE]
                           for (r, _), n in zip(batch, lengths, strict=True)])  # fmt: skip
        self._step = _Step(
            slot_mapping=(pages.long() * PAGE_SIZE + positions % PAGE_SIZE).to(device),
            block_table=torch.stack([request.pages for request, _ in batch]).to(device),
            seq_lens=torch.tensor([r.computed + len(tokens) for r, tokens in batch], dtype=torch.int32, device=device),
            query_start_loc=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        )
        tokens = torch.tensor([[token for _, tokens in batch for token in tokens]], device=device)
        output = self._model(
            tokens, position_ids=positions[None].to(device), use_cache=False, logits_to_keep=rows.to(device)
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Store k and v (T, Hkv, D) in a layer's pages and attend q (T, H, D) to all that is there: (T, H, D)."""
        if layer not in self._caches:
            shape = (self._pages, PAGE_SIZE, k.shape[1])
            self._caches[layer] = (
                torch.zeros(*shape, k.shape[2], dtype=self._kv_dtype, device=k.device),
                torch.zeros(*shape, v.shape[2], dtype=self._kv_dtype, device=v.device),
            )
        step, caches = self._step, self._caches[layer]
        assert step is not None
        b12x_core.write_kv_cache(k, v, *caches, step.slot_mapping)
        out: torch.Tensor = b12x_core.paged_attention(
            q, *caches, step.block_table, step.seq_lens, step.query_start_loc, **arguments
        )
        return out


def _accept(request: _Request, logprobs: torch.Tensor) -> None:
    """Append the likeliest token of each row, as long as the draft agrees with the one before."""
    best = logprobs.topk(LOGPROBS)
    for index, token in enumerate(best.indices[:, 0].tolist()):
        request.tokens.append(token)
        request.top_logprobs.append(dict(zip(best.indices[index].tolist(), best.values[index].tolist(), strict=True)))
        if len(request.tokens) == request.wanted or request.draft[index : index + 1] != [token]:
            break
        # The draft's token was computed with the rest of the step.
        request.computed += 1


def load(checkpoint: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of a checkpoint folder, on the ops.

    Raises:
        UnsupportedError: a quantization or an activation that the ops do not have.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    packing = packings.parse(getattr(config, "quantization_config", None))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tensors = load_file(checkpoint / "model.safetensors", device=device)
    model_class = getattr(transformers, config.architectures[0])
    model: PreTrainedModel = model_class.from_pretrained(
        None,
        config=config,
        state_dict=_without_quantized(tensors, packing),
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        experts_implementation=IMPLEMENTATION,
    )
    model.eval().to(device)
    stored_names = _stored_names(tensors)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name in stored_names:
            weights = core_layers.prepare_linear([packing.read(tensors, stored_names[name])], dtype)
            model.set_submodule(name, _Linear(weights))
        elif hasattr(module, "_apply_gate"):
            module.b12x_experts = _experts(config, packing, tensors, stored_names[name], module, dtype)
            module.b12x_activation = _activation(config, module)
    return model


class _Linear(nn.Module):
    """`b12x_core.linear` where transformers has a linear layer."""

    def __init__(self, weights: LinearWeights) -> None:
        super().__init__()
        self._weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return b12x_core.linear(x, self._weights)


def _without_quantized(tensors: Mapping[str, torch.Tensor], packing: packings.Packing) -> dict[str, torch.Tensor]:
    """What transformers is to load itself. Quantized matrices are replaced later; until then they are zeros."""
    state: dict[str, torch.Tensor] = {}
    extra = {packing.scale, packing.global_scale, packing.input_scale}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if name.endswith("_blocks"):
            experts, rows, *_ = tensor.shape
            columns = math.prod(tensor.shape[2:]) * 2
            state[name.removesuffix("_blocks")] = torch.zeros((), dtype=torch.bfloat16).expand(experts, columns, rows)
        elif last == packing.weight and f"{module}.{packing.scale}" in tensors:
            columns = tensor.shape[1] * packing.scheme.weight.packed
            state[f"{module}.weight"] = torch.zeros((), dtype=torch.bfloat16).expand(tensor.shape[0], columns)
        elif last not in extra and not name.endswith("_scales"):
            state[name] = tensor
    return state


def _stored_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Module names of transformers -> the prefix on disk, for linear layers and for the experts of a layer."""
    names: dict[str, str] = {}
    for tensor in tensors:
        prefix = re.sub(r"(\.experts)\..*", r"\1", tensor)
        prefix = prefix if prefix != tensor else tensor.rpartition(".")[0]
        names[in_transformers(prefix)] = prefix
    return names


def _experts(
    config: Any, packing: packings.Packing, tensors: Mapping[str, torch.Tensor], prefix: str, module: Any,
    dtype: torch.dtype,
) -> ExpertWeights:  # fmt: skip
    if f"{prefix}.gate_up_proj_blocks" in tensors:
        return core_layers.prepare_gpt_oss_experts(tensors, f"{prefix}.")
    gate, up, down = next(
        names for names in _EXPERT_NAMES if any(tensor.startswith(f"{prefix}.0.{names[1]}.") for tensor in tensors)
    )
    projections = {"gate": gate, "up": up, "down": down}
    stored = core_layers.read_experts(
        packing, tensors, lambda expert, which: f"{prefix}.{expert}.{projections[which]}", range(module.num_experts)
    )
    return core_layers.prepare_experts(stored, dtype)


def _activation(config: Any, experts: Any) -> Activation:
    if config.model_type == "gpt_oss":
        return SwiGLU(alpha=experts.alpha, beta=1.0, limit=experts.limit)
    name = getattr(config, "mlp_hidden_act", None) or config.hidden_act
    if name not in FUNCTIONS:
        raise UnsupportedError(f"expert activation must be one of {', '.join(FUNCTIONS)}; got {name!r}")
    return Activation(name, gated=experts.has_gate)


def _attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one flat row of tokens, as transformers calls it: (1, H, T, D) -> (1, T, H, D)."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = module.b12x_engine.attend(
        module.layer_idx,
        q.contiguous(),
        k,
        v,
        scale=scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out[None], None


def _experts_forward(
    experts: Any, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    return b12x_core.fused_moe(
        hidden.contiguous(),
        experts.b12x_experts,
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        activation=experts.b12x_activation,
    )


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
# The op knows from the lengths what a query may see, so no mask is made.
AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
