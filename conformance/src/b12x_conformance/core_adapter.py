"""The adapter `core`: layers and whole models on the ops of `b12x_core` alone, with no engine in between.

It shows that the ops are right before any engine has a say, and what an adapter has to do at least.
"""

from __future__ import annotations

import b12x_core
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

from b12x_conformance import core_layers


@hookimpl
def b12x_adapter_info() -> AdapterInfo:
    """Who this adapter is: the core itself, at its own version."""
    version = b12x_core.__version__
    return AdapterInfo(name="core", engine="b12x-core", serves=f"=={version}", installed=version)


@hookimpl
def b12x_cannot_express(case: Case | TextEngineOptions) -> str | None:
    """Nothing that a case can say is beyond the ops."""
    del case
    return None


@hookimpl
def b12x_linear_layer(case: LinearCase) -> LinearLayer:
    """`b12x_core.linear` on the case's tensors."""
    return core_layers.CoreLinear(case)


@hookimpl
def b12x_moe_layer(case: MoECase) -> MoELayer:
    """`b12x_core.fused_moe` on the case's tensors."""
    return core_layers.CoreMoE(case)


@hookimpl
def b12x_attention_layer(case: AttentionCase) -> AttentionLayer:
    """`b12x_core.write_kv_cache` and `b12x_core.paged_attention` on a cache of their own."""
    return core_layers.CoreAttention(case)


@hookimpl
def b12x_text_engine(checkpoint: str, options: TextEngineOptions) -> TextEngine:
    """A transformers model whose linear layers, experts and attention are the ops."""
    from b12x_conformance.core_engine import CoreEngine

    return CoreEngine(checkpoint, options)
