"""The adapter's hooks (entry point group `b12x.adapters`): how b12x reaches SGLang's own layers, engine and server.

Importing this module imports nothing of SGLang; a hook does when it is called.
"""

from __future__ import annotations

from b12x_core.adapter_support import EngineHooks

from b12x_sglang import SERVES
from b12x_sglang.hooks.context import prepare

HOOKS = EngineHooks(__name__, name="sglang", engine="SGLang", distribution="sglang", serves=SERVES, prepare=prepare)
"""Layers built and loaded by SGLang's own classes, its scheduler in this process, its server; every b12x flag set."""
