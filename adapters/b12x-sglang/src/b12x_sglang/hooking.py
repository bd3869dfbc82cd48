"""Hooks in SGLang's functions, and the proof that they are in place.

SGLang applies the hooks of all plug-ins once those are loaded. It logs one that it cannot apply and goes on, and then a
layer would be served by another kernel than the one that a flag asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from b12x_core import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.plugins.hook_registry import HookType

_targets: list[str] = []


def hook(target: str, function: Callable[..., Any], kind: HookType) -> None:
    """Register a hook with SGLang.

    Args:
        target: dotted path of SGLang's function or method.
        function: as `HookRegistry.register` takes it.
        kind: likewise.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register(target, function, kind)
    _targets.append(target)


def require_hooks() -> None:
    """See that every hook is in place.

    Raises:
        UnsupportedError: SGLang could not apply one, and says in its log why.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in _targets if target not in HookRegistry._patched]
    if missing:
        raise UnsupportedError(f"b12x cannot serve: SGLang did not apply its hooks of {', '.join(missing)}")
