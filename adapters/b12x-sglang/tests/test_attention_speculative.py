"""Speculation with the attention backend: what is refused, draft backends by name, n-gram trees made chains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_world import World, layer, pool
from b12x_core import UnsupportedError
from b12x_sglang.attention.backend import B12xAttentionBackend
from b12x_sglang.attention.draft import B12xMultiStepDraftBackend
from b12x_sglang.attention.speculative import chains
from b12x_sglang.hooks.context import layer_context
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
from sglang.srt.speculative.draft_utils import DraftBackendFactory

NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
}


def world() -> World:
    return World(pool(16), [layer(0), layer(1)])


def told(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """A way to build a backend where SGLang's published arguments say so, whatever it would need for them."""

    def build(runner: Any) -> Any:
        spec = SimpleNamespace(**fields)
        monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
        return B12xAttentionBackend(runner)

    return build


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"])
def test_chains_are_served(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    world().create(told(monkeypatch, speculative_algorithm=algorithm, speculative_eagle_topk=1))


@pytest.mark.parametrize(
    ("algorithm", "breadth", "sentence"),
    [
        ("EAGLE", 4, "chains of tokens, not trees: --speculative-eagle-topk must be 1; got 4"),
        ("NGRAM", 10, "chains of tokens, not trees: --speculative-ngram-max-bfs-breadth must be 1; got 10"),
        ("DFLASH", 1, "EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM; got DFLASH"),
    ],
)
def test_trees_and_unknown_proposals_end_the_start_up(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, breadth: int, sentence: str
) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        world().create(told(monkeypatch, speculative_algorithm=algorithm, speculative_eagle_topk=breadth))


def test_ngram_arguments_of_sglang_are_served_at_breadth_1_and_refused_as_they_are_by_default() -> None:
    world().create(**NGRAM)
    with pytest.raises(UnsupportedError, match="--speculative-ngram-max-bfs-breadth must be 1; got 10"):
        World(pool(1), [layer(0), layer(1)]).create(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)


def test_draft_backends_are_found_by_name() -> None:
    def build(runner: Any) -> tuple[Any, Any]:
        runner.draft_attention_backend = None
        runner.model_config.hf_config = runner.model_config.hf_text_config = SimpleNamespace()
        factory = DraftBackendFactory(runner, topk=1, speculative_num_steps=4)
        factory_wrapped = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper_for_draft_extend"
        with pytest.MonkeyPatch.context() as patch:
            # It looks for models with layers that are no attention.
            patch.setattr(factory_wrapped, lambda _, backend: backend)
            return factory.create_decode_backend(), factory.create_draft_extend_backend()

    steps, extension = world().create(build)
    assert isinstance(steps, B12xMultiStepDraftBackend)
    assert [child._draft_step for child in steps.attn_backends] == [0, 1, 2]
    assert isinstance(extension, B12xAttentionBackend)
    assert extension._draft_step is None
    for backend in (steps, extension, *steps.attn_backends):
        assert backend.decode_attention_backend_str == "b12x"
        assert not backend.needs_cpu_seq_lens


def tree(parents: list[int]) -> np.ndarray:
    """SGLang's mask of one tree from the parent of each node after the root."""
    mask = np.eye(len(parents) + 1, dtype=np.int64)
    for node, parent in enumerate(parents, start=1):
        mask[node] |= mask[parent]
    return mask.reshape(-1)


@pytest.mark.parametrize(
    ("parents", "kept"),
    [
        ([0, 1, 2, 3], [10, 11, 12, 13, 14]),  # a chain stays
        ([0, 0, 1, 2], [10, 11, 13, 0, 0]),  # of equal paths, the first
        ([0, 0, 2, 3], [10, 12, 13, 14, 0]),  # the longest
        ([0, 1, 0, 0], [10, 11, 12, 0, 0]),  # padding hangs from the root
        ([0, 0, 0, 0], [10, 11, 0, 0, 0]),
    ],
)
def test_the_longest_path_of_a_tree_is_kept_as_a_chain(parents: list[int], kept: list[int]) -> None:
    first, second = np.arange(10, 15), np.arange(20, 25)
    tokens, mask = chains(np.concatenate([first, second]), np.concatenate([tree(parents), tree([0, 1, 2, 3])]), 5)
    assert tokens.reshape(2, 5).tolist() == [kept, [20, 21, 22, 23, 24]]
    assert tokens.dtype == mask.dtype == np.int64
    assert (mask.reshape(2, 5, 5) == np.tril(np.ones((5, 5)))).all()


@pytest.mark.parametrize("backend", ["b12x", "torch_native"])
def test_sglangs_own_proposals_are_chains_where_b12x_verifies_them(backend: str) -> None:
    """At breadth 1, two matches that go on differently give SGLang's tree two branches."""
    with layer_context(torch.bfloat16, "cpu", **NGRAM, attention_backend=backend):
        corpus = NgramCorpus(max_trie_depth=8, min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=6)
        corpus.batch_put([[1, 2, 3, 4, 5], [9, 3, 6, 7, 8]])
        corpus.synchronize()
        tokens, mask = corpus.batch_get(["request"], [[1, 2, 3]], [3])
    chain = np.tril(np.ones((6, 6), dtype=np.int64))
    assert tokens[0] == 3
    assert (mask.reshape(6, 6) == chain).all() == (backend == "b12x")
    if backend == "b12x":
        assert tokens.tolist() in ([3, 4, 5, 0, 0, 0], [3, 6, 7, 8, 0, 0])
