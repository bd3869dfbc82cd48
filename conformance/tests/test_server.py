"""Server level: the engine's own HTTP server with every b12x flag, asked over the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from b12x_conformance import serving
from b12x_conformance.checkpoints.moe import smollm2_moe
from b12x_core.adapters import Adapter, TextEngineOptions

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server(adapter: Adapter, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    if not adapter.implements("b12x_server_command"):
        pytest.skip(f"{adapter.info.engine} has no HTTP server")
    options = TextEngineOptions(max_model_len=1024, device=device)
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


def test_completion_equals_itself_alone_and_in_a_batch(server: serving.Server) -> None:
    client, model = server.client(), server.model()
    prompts = ["The lighthouse stood on", "A court of law is", "Water boils when"]
    batch = client.completions.create(model=model, prompt=prompts, max_tokens=12, temperature=0)
    assert len(batch.choices) == len(prompts)
    for prompt, choice in zip(prompts, batch.choices, strict=True):
        alone = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
        assert alone.choices[0].text == choice.text


def test_b12x_served_the_layers(server: serving.Server) -> None:
    server.client().completions.create(model=server.model(), prompt="One", max_tokens=2, temperature=0)
    served = server.served()
    layers = {key: count["layers"] for key, count in served.items()}
    assert layers["linear/nvfp4-w4a16"] == 60  # qkv and o
    assert layers["fused_moe/nvfp4-w4a16"] == 30
    assert layers["paged_attention/bfloat16"] == 30
    assert layers["write_kv_cache/bfloat16"] == 30
    assert all(count["calls"] > 0 for count in served.values())


def test_a_bad_request_is_refused_and_the_server_lives(server: serving.Server, tmp_path: Path) -> None:
    from openai import BadRequestError

    client, model = server.client(), server.model()
    with pytest.raises(BadRequestError):
        client.completions.create(model=model, prompt="x", max_tokens=100_000, temperature=0)
    assert client.completions.create(model=model, prompt="One", max_tokens=1, temperature=0).choices
