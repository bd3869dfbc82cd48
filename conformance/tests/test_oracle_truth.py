"""The truth, the comparison with it, and the cache of checkpoints: what the model tests rest on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from b12x_conformance import data, environment
from b12x_conformance.checkpoints import cache, moe, quantized, smollm2
from b12x_conformance.compare import NEAR_TIE, match_text
from b12x_conformance.truth import Continuation, Truth

# The argument is called `cache` in later versions of transformers, and there is no name that all versions know.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(smollm2.bf16())(data.text()).input_ids
    return ids[:64]


@pytest.fixture(scope="module")
def dense(tokens: list[int]) -> torch.Tensor:
    return Truth(smollm2.bf16()).score(tokens)


def test_mixture_of_experts_says_what_the_dense_model_says(tokens: list[int], dense: torch.Tensor) -> None:
    assert torch.allclose(Truth(moe.smollm2_moe("bf16")).score(tokens), dense, atol=1e-3)


@pytest.mark.parametrize(("kind", "farthest"), [("fp8-block", 0.2), ("modelopt-nvfp4-w4a16", 0.6)])
def test_dequantized_checkpoint_resembles_the_original(
    kind: str, farthest: float, tokens: list[int], dense: torch.Tensor
) -> None:
    """A scale read the wrong way round would leave nothing of the model."""
    assert (Truth(quantized.smollm2_quantized(kind)).score(tokens) - dense).abs().mean() < farthest


def test_unequal_scales_of_fused_projections_mean_the_same(tokens: list[int]) -> None:
    equal, unequal = (quantized.smollm2_quantized("modelopt-nvfp4-w4a16", unequal=unequal) for unequal in (False, True))
    assert (Truth(equal).score(tokens) - Truth(unequal).score(tokens)).abs().mean() < 0.6


@pytest.mark.parametrize(("gap", "agrees"), [(NEAR_TIE * 0.9, True), (NEAR_TIE * 1.1, False)])
def test_texts_may_part_at_a_near_tie_only(gap: float, agrees: bool) -> None:
    truth = Continuation(
        torch.tensor([5, 7, 9]),
        torch.tensor([[5, 1], [7, 2], [9, 3]]),
        torch.tensor([[-0.1, -9.0], [-1.0, -1.0 - gap], [-1.0, -2.0]]),
    )
    assert match_text(0, truth, [5, 7, 9]).matched == 3
    assert match_text(0, truth, [5, 2, 4]).agrees() is agrees
    assert not match_text(0, truth, [6, 7, 9]).agrees(), "a token that is no candidate is no tie"


def test_failed_build_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(environment.CACHE.name, str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cache.folder("broken", {}, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".locks"]
    whole = cache.folder("broken", {}, lambda folder: (folder / "whole").touch())
    assert [path.name for path in whole.iterdir()] == ["whole"]
    assert cache.folder("broken", {}, fail) == whole
