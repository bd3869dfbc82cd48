"""What SGLang does on a CPU for the sake of its own kernels, undone where none of them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PADDING = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def lift() -> None:
    """Allow an FP8 KV cache (SGLang's kernels need AMX for it, and a form of it that only they read), pad no widths."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PADDING, lambda model_config, *_: model_config, HookType.REPLACE)
    HookRegistry.register(f"{_CONFIGURATOR}.configure", _without_amx, HookType.AROUND)
    HookRegistry.register(f"{_CONFIGURATOR}._build_mha_quant_method", _plain, HookType.REPLACE)


def _without_amx(configure: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    from sglang.srt.mem_cache import kv_cache_configurator as module

    asked = {name: getattr(module, name) for name in ("cpu_has_amx_support", "attention_backends")}
    module.cpu_has_amx_support = lambda: True
    module.attention_backends = lambda: ("intel_amx",)
    try:
        return configure(*arguments, **named)
    finally:
        for name, function in asked.items():
            setattr(module, name, function)


def _plain(configurator: Any, *, num_layers: int) -> Any:
    """What every other device uses."""
    return configurator._build_fp4_quant_method(num_layers=num_layers)
