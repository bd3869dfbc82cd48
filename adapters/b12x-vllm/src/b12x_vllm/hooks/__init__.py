"""The adapter's hooks (entry point group `b12x.adapters`): how b12x reaches vLLM's own layers, engine and server.

Importing this module imports nothing of vLLM; a hook does when it is called.
"""

from __future__ import annotations

from b12x_core.adapter_support import EngineHooks

from b12x_vllm import SERVES
from b12x_vllm.hooks.context import prepare

HOOKS = EngineHooks(__name__, name="vllm", engine="vLLM", distribution="vllm", serves=SERVES, prepare=prepare)
"""Layers built and loaded by vLLM's own classes, its engine in this process, and `vllm serve`; every b12x flag set."""
