"""Speculative decoding: proposals are chains of tokens, drafted in steps and verified as a causal extension.

A draft model proposes a chain where --speculative-eagle-topk is 1. SGLang's n-gram proposals are a tree at any breadth:
matches of several lengths each add a branch at its root, and so does what pads it. With
--speculative-ngram-max-bfs-breadth 1 one path of the tree is kept, so that what is verified is a chain. Which tokens
are proposed never changes what is generated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from b12x_core import UnsupportedError

from b12x_sglang.flags import FLAG
from b12x_sglang.hooking import hook

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Values of --speculative-algorithm whose proposals can be chains."""

NGRAM_PROPOSALS = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get"


def register() -> None:
    """Have SGLang's n-gram proposals made chains."""
    from sglang.srt.plugins.hook_registry import HookType

    hook(NGRAM_PROPOSALS, keep_one_path, HookType.AFTER)


def refuse_speculation() -> None:
    """Refuse proposals that are not chains.

    Raises:
        UnsupportedError: SGLang was told to propose trees, or by an algorithm whose proposals are not known here.
    """
    from sglang.srt.runtime_context import get_spec

    algorithm, breadth = get_spec().speculative_algorithm, get_spec().speculative_eagle_topk
    if algorithm is None:
        return
    if algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"attention backend {FLAG} serves --speculative-algorithm {', '.join(ALGORITHMS)}; got {algorithm}"
        )
    flag = "--speculative-ngram-max-bfs-breadth" if algorithm == "NGRAM" else "--speculative-eagle-topk"
    if breadth is not None and breadth > 1:
        raise UnsupportedError(
            f"attention backend {FLAG} verifies chains of tokens, not trees: {flag} must be 1; got {breadth}"
        )


def keep_one_path(proposed: tuple[np.ndarray, np.ndarray], corpus: Any, *_: Any, **__: Any) -> Any:
    """Turn the trees that SGLang proposes into chains, where b12x verifies them; None leaves them."""
    from sglang.srt.runtime_context import attention_backends

    return chains(*proposed, corpus.draft_token_num) if FLAG in attention_backends() else None


def chains(tokens: np.ndarray, mask: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The longest path of each tree (of equal ones, the first), as a chain that is padded at its end.

    Args:
        tokens: (R * length,), nodes of R trees, each in an order in which a parent comes before its children; the root
            is a request's last token.
        mask: (R * length * length,): 1 where a node is the other's ancestor or itself.
        length: nodes of a tree.

    Returns:
        tokens and mask of the chains, in the same shapes and dtypes.
    """
    lineage = mask.reshape(-1, length, length) != 0
    depths = lineage.sum(-1)
    path = lineage[np.arange(len(lineage)), depths.argmax(-1)]
    front_first = np.argsort(~path, axis=-1, kind="stable")
    nodes = np.take_along_axis(tokens.reshape(-1, length), front_first, axis=-1)
    nodes[np.arange(length) >= depths.max(-1, keepdims=True)] = 0
    chain = np.tril(np.ones((length, length), dtype=mask.dtype))
    return nodes.reshape(-1), np.tile(chain.reshape(-1), len(lineage))
