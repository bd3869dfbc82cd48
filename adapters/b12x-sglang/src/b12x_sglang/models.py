"""Models for which SGLang decides by a list of names what may serve them, opened for b12x.

Lists of attention backends say which of SGLang's own have what a model needs: sinks and windows for gpt-oss, windows
for the others. b12x has it too, and SGLang has no way to say so. For these architectures, and only while the check
runs, b12x answers to a name that is in every list.

A list of quantizations says for which of them Mixtral's experts are fused. For any other SGLang builds a model whose
experts are linear layers, which --moe-runner-backend says nothing about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from b12x_sglang.flags import FLAG, moe_requested
from b12x_sglang.hooking import hook

ARCHITECTURES = frozenset(
    {
        "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GptOssForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
    }
)
"""Those whose list is about plain attention, which b12x has whole."""

_IN_EVERY_LIST = "triton"


def register() -> None:
    """Follow SGLang's decisions."""
    from sglang.srt.plugins.hook_registry import HookType

    hook("sglang.srt.model_loader.utils.get_model_architecture", _fuse_experts, HookType.AFTER)
    # The checks are assertions in the middle of these functions, on names that they look up themselves.
    hook("sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments", _adjust, HookType.AROUND)
    hook("sglang.srt.layers.attention.attention_registry.attn_backend_wrapper", _wrap_hybrid, HookType.AROUND)


def _fuse_experts(chosen: tuple[type, str], model_config: Any) -> tuple[type, str] | None:
    """After the choice of a model's class; None keeps it."""
    if chosen[1] != "QuantMixtralForCausalLM" or not moe_requested():
        return None
    from sglang.srt.models.registry import ModelRegistry

    fused: tuple[type, str] = ModelRegistry.resolve_model_cls(["MixtralForCausalLM"])
    model_config._resolved_model_arch = fused[1]
    return fused


class _View:
    """SGLang's view of its configuration, with b12x's name replaced where it stands for an attention backend."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return _IN_EVERY_LIST if name.endswith("attention_backend") and value == FLAG else value


def _adjust(adjust: Callable[[Any], None], server_args: Any) -> None:
    """Run the adjustments for a model."""
    from sglang.srt.arg_groups import model_hook

    view = model_hook.resolved_view
    if FLAG not in model_hook.attention_backends_of(view(server_args)) or not _listed(server_args):
        return adjust(server_args)
    # A name of the module, since SGLang makes a view for each check.
    model_hook.resolved_view = lambda server_args: _View(view(server_args))
    try:
        return adjust(server_args)
    finally:
        model_hook.resolved_view = view


def _listed(server_args: Any) -> bool:
    from sglang.srt.arg_groups import model_hook

    if model_hook.parse_connector_type(server_args.model_path) == model_hook.ConnectorType.INSTANCE:
        return False  # there is no configuration to read
    architectures = model_hook.model_config_of(server_args).hf_config.architectures
    return architectures[0] in ARCHITECTURES


def _wrap_hybrid(wrap: Callable[[Any, Any], Any], runner: Any, full_attn_backend: Any) -> Any:
    """Combine the backend of full attention with that of linear attention (Gated DeltaNet), where a model has both.

    On Blackwell SGLang does so for the names on a list. Which backend runs is settled: it is in the arguments.
    """
    from sglang.srt.layers.attention import attention_registry

    names = ("prefill_attention_backend_str", "decode_attention_backend_str")
    ours = [name for name in names if getattr(runner, name, None) == FLAG]
    if not ours or attention_registry.hybrid_gdn_config(runner.model_config) is None:
        return wrap(runner, full_attn_backend)
    for name in ours:
        setattr(runner, name, _IN_EVERY_LIST)
    try:
        return wrap(runner, full_attn_backend)
    finally:
        for name in ours:
            setattr(runner, name, FLAG)
