"""Server level: the engine's own HTTP server with every b12x flag, asked over the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from b12x_conformance import serving
from b12x_conformance.checkpoints.moe import smollm2_moe
from b12x_conformance.compare import NEAR_TIE
from b12x_core.adapters import Adapter, TextEngineOptions

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server(adapter: Adapter, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    if not adapter.implements("b12x_server_command"):
        pytest.skip(f"{adapter.info.engine} has no HTTP server")
    # fp16, since the noise of bf16 alone moves two tokens further apart than a near tie.
    options = TextEngineOptions(dtype=torch.float16, max_model_len=1024, device=device)
    folder = tmp_path_factory.mktemp("server")
    with serving.serve(adapter, smollm2_moe("modelopt-nvfp4-w4a16"), folder, options) as running:
        yield running


def test_chat_streams_coherent_text(server: serving.Server) -> None:
    stream = server.client().chat.completions.create(
        model=server.model(),
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert sum(map(bool, pieces)) > 3, f"not streamed: {pieces}"
    assert "Paris" in "".join(pieces)


def test_completion_alone_and_in_a_batch_part_at_a_near_tie_only(server: serving.Server) -> None:
    """The order of a float32 sum depends on the batch, so texts need not be equal where two tokens nearly are."""
    client, model = server.client(), server.model()
    prompts = ["The lighthouse stood on", "A court of law is", "Water boils when"]
    options = {"model": model, "max_tokens": 12, "temperature": 0, "logprobs": 5}
    batch = client.completions.create(prompt=prompts, **options)
    assert len(batch.choices) == len(prompts)
    for prompt, choice in zip(prompts, batch.choices, strict=True):
        alone = client.completions.create(prompt=prompt, **options).choices[0]
        steps = zip(alone.logprobs.tokens, choice.logprobs.tokens, alone.logprobs.top_logprobs, strict=True)
        for step, (expected, got, candidates) in enumerate(steps):
            if got != expected:
                gap = candidates[expected] - candidates.get(got, float("-inf"))
                assert gap < NEAR_TIE, f"{prompt!r}, token {step}: {got!r} in a batch, {expected!r} alone by {gap:.3f}"
                break


def test_b12x_served_the_layers(server: serving.Server) -> None:
    server.client().completions.create(model=server.model(), prompt="One", max_tokens=2, temperature=0)
    served = server.served()
    layers = {key: count["layers"] for key, count in served.items()}
    assert layers["linear/nvfp4-w4a16"] == 60  # qkv and o
    assert layers["fused_moe/nvfp4-w4a16"] == 30
    assert layers["paged_attention/float16"] == 30
    assert layers["write_kv_cache/float16"] == 30
    assert all(count["calls"] > 0 for count in served.values())


def test_a_bad_request_is_refused_and_the_server_lives(server: serving.Server, tmp_path: Path) -> None:
    from openai import BadRequestError

    client, model = server.client(), server.model()
    with pytest.raises(BadRequestError):
        client.completions.create(model=model, prompt="x", max_tokens=100_000, temperature=0)
    assert client.completions.create(model=model, prompt="One", max_tokens=1, temperature=0).choices
