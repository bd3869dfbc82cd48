"""b12x kernels behind vLLM's --attention-backend B12X, --linear-backend b12x and --moe-backend b12x.

Installing the distribution is enough: vLLM calls `register` in each of its processes.
"""

from __future__ import annotations

import logging

SERVES = "==0.33.0"
"""Engine versions (PEP 440) that this adapter was proven with."""

FLAGS = "--attention-backend B12X, --linear-backend b12x, --moe-backend b12x"
KINDS = ("attention", "linear", "moe")
"""Modules that register what stands behind one of them."""

# A child of vLLM's logger, so that lines look and are filtered as vLLM's own.
_log = logging.getLogger("vllm.plugins.b12x")
_done = False


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: put the kernels behind vLLM's flags.

    vLLM may call it several times in a process and does not catch what it raises, so that an engine of another version,
    whose flags still exist but mean vLLM's own kernels, is told of in one line and left alone.
    """
    global _done
    if _done:
        return
    try:
        from b12x_core.adapter_support import register_kinds, unserved
    except ImportError as error:
        reason: str | None = f"its kernels cannot be imported ({error}): pip install b12x-core"
    else:
        reason = unserved("vllm", "vLLM", SERVES) or register_kinds(__name__, KINDS, "vLLM")
    if reason is not None:
        _log.warning("b12x does not serve %s: %s", FLAGS, reason)
        return
    _done = True
