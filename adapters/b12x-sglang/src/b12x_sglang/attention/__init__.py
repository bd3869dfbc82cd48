"""SGLang's attention backend b12x, served by `b12x_core.paged_attention` and `b12x_core.write_kv_cache`.

`backend` is the backend, `pools` what it needs of SGLang's KV caches, `metadata` the batch as the ops take it, and
`speculative` what drafting and verification need beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from b12x_sglang.flags import FLAG

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from b12x_sglang.attention.backend import B12xAttentionBackend


def register() -> None:
    """Make b12x the name of the backend, for a target model and for a draft model. May be called again."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from b12x_sglang.attention import speculative

    register_attention_backend(FLAG)(_create)
    speculative.register()


def _create(runner: ModelRunner) -> B12xAttentionBackend:
    """SGLang's factory. Raises UnsupportedError, which ends the start-up, for what is not served."""
    from b12x_sglang.attention.backend import B12xAttentionBackend

    return B12xAttentionBackend(runner)
