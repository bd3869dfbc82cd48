"""Warm-up units, collected and run by vLLM's own functions."""

from __future__ import annotations

import pytest
import torch
from b12x_vllm import warmup
from vllm.model_executor.warmup.b12x_warmup import _collect_warmup_units, _compile_warmup_units


def test_layers_with_equal_keys_are_warmed_up_once_for_every_token_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    runs: list[tuple[str, int, torch.dtype]] = []
    model = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    for layer, key in zip(model, ("a", "a", "b"), strict=True):
        warmup.attach(layer, "linear", key, lambda tokens, dtype, key=key: runs.append((key, tokens, dtype)))
    units = _collect_warmup_units(model, (1, 8, 512, 8), torch.float16)
    assert _compile_warmup_units(units) == {"linear": 2}
    assert runs == [(key, tokens, torch.float16) for key in ("a", "b") for tokens in (512, 8, 1)]
