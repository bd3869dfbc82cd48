"""SGLang's attention backend b12x, served by `b12x_core.paged_attention` and `b12x_core.write_kv_cache`.

`backend` is the backend, `pools` what it needs of SGLang's KV caches, `metadata` the batch as the ops take it, `draft`
the backend of a draft model's steps, and `speculative` says which proposals are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from b12x_sglang.flags import FLAG
from b12x_sglang.hooking import hook

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from b12x_sglang.attention.backend import B12xAttentionBackend

_DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Make b12x the name of the backend, for a target model and for a draft model. May be called again."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookType

    from b12x_sglang.attention import speculative

    register_attention_backend(FLAG)(_create)
    # SGLang keeps the names of draft backends in tables inside two functions; both hand them on to this one.
    hook(_DRAFT_BACKENDS, _offer_draft_backends, HookType.BEFORE)
    speculative.register()


def _create(runner: ModelRunner) -> B12xAttentionBackend:
    """SGLang's factory. Raises UnsupportedError, which ends the start-up, for what is not served."""
    from b12x_sglang.attention.backend import B12xAttentionBackend

    return B12xAttentionBackend(runner)


def _offer_draft_backends(
    factory: DraftBackendFactory,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, AttentionBackend]]],
    *others: Any,
    **options: Any,
) -> None:
    """Add b12x to the table of one kind of draft backend: one with a child for each step, or one for the extension."""
    from b12x_sglang.attention.backend import B12xAttentionBackend
    from b12x_sglang.attention.draft import B12xMultiStepDraftBackend

    runner = factory.draft_model_runner
    if options.get("stamps_children"):
        steps, topk = factory.speculative_num_steps, factory.topk
        backend_map[FLAG] = lambda: (FLAG, B12xMultiStepDraftBackend(runner, topk, steps))
    else:
        backend_map[FLAG] = lambda: (FLAG, B12xAttentionBackend(runner))
