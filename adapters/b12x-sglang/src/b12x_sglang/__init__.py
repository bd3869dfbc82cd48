"""b12x kernels behind SGLang's --attention-backend, --fp8-gemm-backend, --fp4-gemm-backend and --moe-runner-backend.

Installing the distribution is enough: SGLang calls `register` in each of its processes.
"""

from __future__ import annotations

import logging

SERVES = "==0.5.23"
"""Engine versions (PEP 440) that this adapter was proven with."""

FLAGS = "--attention-backend, --fp8-gemm-backend, --fp4-gemm-backend and --moe-runner-backend b12x"

KINDS = ("flags", "attention", "linear", "moe", "models")
"""Modules that register what they are about, in this order."""

_log = logging.getLogger("sglang.b12x")
_done = False


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`: put the kernels behind SGLang's flags.

    SGLang logs what a plug-in raises and goes on without it; the flags then do not know the value b12x, and the user is
    told no more than that. So whatever stands in the way is said in one line.
    """
    global _done
    if _done:
        return
    try:
        from b12x_core.adapter_support import register_kinds, unserved
    except ImportError as error:
        reason: str | None = f"its kernels cannot be imported ({error}): pip install b12x-core"
    else:
        reason = unserved("sglang", "SGLang", SERVES) or register_kinds(__name__, KINDS, "SGLang")
    if reason is not None:
        _log.warning("b12x does not serve %s: %s", FLAGS, reason)
        return
    _done = True
