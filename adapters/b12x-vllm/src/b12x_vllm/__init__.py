"""b12x kernels behind vLLM's --attention-backend B12X, --linear-backend b12x and --moe-backend b12x.

Installing the distribution is enough: vLLM calls `register` in each of its processes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging

from packaging.specifiers import SpecifierSet

SERVES = "==0.33.0"
"""Engine versions (PEP 440) that this adapter was proven with."""

FLAGS = "--attention-backend B12X, --linear-backend b12x, --moe-backend b12x"

# A child of vLLM's logger, so that lines look and are filtered as vLLM's own.
_log = logging.getLogger("vllm.plugins.b12x")
_done = False


def why_not() -> str | None:
    """Why this adapter cannot serve the installed engine (one sentence), None if it can."""
    try:
        installed = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM is not installed"
    if not SpecifierSet(SERVES).contains(installed, prereleases=True):
        return f"this version serves vLLM {SERVES}, installed is {installed}: install a matching pair"
    try:
        importlib.import_module("b12x_core")
    except ImportError as error:
        return f"its kernels cannot be imported ({error}): pip install b12x-core"
    return None


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: put the kernels behind vLLM's flags.

    vLLM may call it several times in a process and does not catch what it raises, so that an engine of another version,
    whose flags still exist but mean vLLM's own kernels, is told of in one line and left alone.
    """
    global _done
    if _done:
        return
    reason = why_not()
    if reason is None:
        reason = _register_all()
    if reason is not None:
        _log.warning("b12x does not serve %s: %s", FLAGS, reason)
        return
    _done = True


def _register_all() -> str | None:
    """Register every kind of layer, or none; returns why not."""
    try:
        kinds = [importlib.import_module(f"{__name__}.{kind}") for kind in ("attention", "linear", "moe")]
    except ImportError as error:
        return f"vLLM lacks an interface that the adapter needs ({error})"
    for kind in kinds:
        kind.register()
    return None
