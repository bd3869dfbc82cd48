"""The adapter's hooks (entry point group `b12x.adapters`): how b12x reaches vLLM's own layers, engine and server.

Importing this module imports nothing of vLLM; a hook does when it is called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from b12x_core.adapters import (
    AdapterInfo,
    AttentionCase,
    AttentionLayer,
    Case,
    LinearCase,
    LinearLayer,
    MoECase,
    MoELayer,
    ServerCommand,
    TextEngine,
    TextEngineOptions,
    hookimpl,
)

from b12x_vllm import SERVES
from b12x_vllm.hooks.context import prepare

_MODULES: dict[type, str] = {
    LinearCase: "linear",
    MoECase: "moe",
    AttentionCase: "attention",
    TextEngineOptions: "engine",
}
"""The module beside this one that serves a case."""


def _module(case: Case | TextEngineOptions) -> Any:
    """The module that serves a case, imported once vLLM is ready for the case's device."""
    prepare(case.device)
    return importlib.import_module(f"{__name__}.{_MODULES[type(case)]}")


@hookimpl
def b12x_adapter_info() -> AdapterInfo:
    """Who this adapter is."""
    try:
        installed: str | None = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    return AdapterInfo(name="vllm", engine="vLLM", serves=SERVES, installed=installed)


@hookimpl
def b12x_cannot_express(case: Case | TextEngineOptions) -> str | None:
    """Why vLLM's own interfaces cannot express a case, None if they can (a module without limits says nothing)."""
    limits: Callable[[Any], str | None] | None = getattr(_module(case), "cannot_express", None)
    return limits(case) if limits is not None else None


@hookimpl
def b12x_linear_layer(case: LinearCase) -> LinearLayer:
    """The engine's own linear layer, loaded by its own loader."""
    layer: LinearLayer = _module(case).build(case)
    return layer


@hookimpl
def b12x_moe_layer(case: MoECase) -> MoELayer:
    """The engine's own mixture-of-experts layer, loaded by its own loader."""
    layer: MoELayer = _module(case).build(case)
    return layer


@hookimpl
def b12x_attention_layer(case: AttentionCase) -> AttentionLayer:
    """The engine's own attention layer with a KV cache in the engine's own layout."""
    layer: AttentionLayer = _module(case).build(case)
    return layer


@hookimpl
def b12x_text_engine(checkpoint: str, options: TextEngineOptions) -> TextEngine:
    """The engine in this process, with every b12x flag set."""
    engine: TextEngine = _module(options).start(checkpoint, options)
    return engine


@hookimpl
def b12x_server_command(checkpoint: str, port: int, options: TextEngineOptions) -> ServerCommand:
    """`vllm serve` with every b12x flag set."""
    from b12x_vllm.hooks import server

    return server.command(checkpoint, port, options)
