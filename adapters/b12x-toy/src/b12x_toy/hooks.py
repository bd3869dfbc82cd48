"""The adapter's hooks (entry point group `b12x.adapters`): how the conformance suite reaches the toy engine.

Importing this module does not import transformers; a hook does when it is called.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from b12x_core import FP8_BLOCK, UnsupportedError, lost_block_scales
from b12x_core.adapter_support import installed
from b12x_core.adapters import (
    AdapterInfo,
    AttentionCase,
    AttentionLayer,
    Case,
    LinearCase,
    LinearLayer,
    MoECase,
    MoELayer,
    TextEngine,
    TextEngineOptions,
    hookimpl,
)

from b12x_toy import SERVES
from b12x_toy.checkpoint import load_experts, load_linear, packing_of

MODEL_TYPES = ("gemma2", "llama", "mixtral", "qwen3_moe")
"""Models that it was proven with. Another may ask of attention or of its experts what is not looked at here."""


@hookimpl
def b12x_adapter_info() -> AdapterInfo:
    """Who this adapter is."""
    return AdapterInfo(name="toy", engine="transformers", serves=SERVES, installed=installed("transformers"))


@hookimpl
def b12x_cannot_express(case: Case | TextEngineOptions, checkpoint: str | None) -> str | None:
    """Why the toy engine cannot express a case (one sentence), None if it can."""
    if isinstance(case, MoECase) and (case.ep_size > 1 or case.router_weight_on_input):
        return "the toy engine has all experts on one rank, and multiplies their output with the routed weight"
    if isinstance(case, TextEngineOptions) and case.speculative_tokens and case.max_num_batched_tokens:
        return "the toy engine reads a prompt in one piece where it drafts tokens"
    if isinstance(case, LinearCase | MoECase):
        quantization = case.quantization
    elif checkpoint is not None:
        config = json.loads(Path(checkpoint, "config.json").read_text())
        quantization = config.get("quantization_config")
        if config["model_type"] not in MODEL_TYPES:
            return f"the toy engine knows models of the types {', '.join(MODEL_TYPES)}; got {config['model_type']}"
    else:
        return None
    try:
        packing = packing_of(quantization)
    except UnsupportedError as reason:
        return str(reason)
    if isinstance(case, LinearCase) and packing.scheme.weight == FP8_BLOCK:
        return lost_block_scales("the toy engine", [rows for _, rows in case.shards])
    return None


@hookimpl
def b12x_linear_layer(case: LinearCase) -> LinearLayer:
    """A linear layer of the toy engine."""
    from b12x_toy.layers import Linear

    _refuse_what_cannot_be_expressed(case)
    return Linear(load_linear(packing_of(case.quantization), _tensors(case), [name for name, _ in case.shards]))


@hookimpl
def b12x_moe_layer(case: MoECase) -> MoELayer:
    """The experts of a layer of the toy engine."""
    from b12x_toy.layers import Experts

    _refuse_what_cannot_be_expressed(case)
    names = [str(expert) for expert in range(case.num_experts)]
    experts = Experts(load_experts(packing_of(case.quantization), _tensors(case), names), case.activation)
    return lambda x, topk_weights, topk_ids: experts(x, topk_ids, topk_weights)


@hookimpl
def b12x_attention_layer(case: AttentionCase) -> AttentionLayer:
    """Attention of the toy engine, over its pages."""
    from b12x_toy.layers import KV_DTYPES, Pages

    stored = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    scales = {name: torch.tensor(scale, device=case.device) for name, scale in stored.items()}
    pages = Pages(case.num_pages, case.page_size, KV_DTYPES[case.kv_dtype], **scales)
    options: dict[str, Any] = {
        "scale": case.scale,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": case.sinks,
    }
    return SimpleNamespace(write=pages.write, run=functools.partial(pages.run, **options))


@hookimpl
def b12x_text_engine(checkpoint: str, options: TextEngineOptions) -> TextEngine:
    """The toy engine with a whole model."""
    from b12x_toy.engine import ToyEngine

    _refuse_what_cannot_be_expressed(options, checkpoint)
    return ToyEngine(checkpoint, options)


def _refuse_what_cannot_be_expressed(case: Case | TextEngineOptions, checkpoint: str | None = None) -> None:
    reason = b12x_cannot_express(case, checkpoint)
    if reason is not None:
        raise UnsupportedError(reason)


def _tensors(case: LinearCase | MoECase) -> dict[str, torch.Tensor]:
    """The tensors of a case, where its layer runs."""
    return {name: tensor.to(case.device) for name, tensor in case.tensors.items()}
