"""Discovery of adapters and calls of their hooks."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch
from b12x_core import UnsupportedError
from b12x_core.adapters import Adapter, AdapterInfo, LinearCase, discover, hookimpl

CASE = LinearCase(shards=(("o_proj", 4),), k=8, tensors={}, quantization=None)


class Toy:
    """An adapter with one layer hook."""

    @hookimpl
    def b12x_adapter_info(self) -> AdapterInfo:
        return AdapterInfo("toy", "Toy", "==1.0", None)

    @hookimpl
    def b12x_cannot_express(self, case: object) -> str | None:
        return "no" if case is CASE else None

    @hookimpl
    def b12x_linear_layer(self, case: LinearCase) -> object:
        return lambda x: x + case.k


def fake_entry_points(monkeypatch: pytest.MonkeyPatch, **plugins: object) -> None:
    points = [SimpleNamespace(name=name, load=lambda p=plugin: p) for name, plugin in plugins.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "b12x.adapters" else [])


def test_hooks_are_reached_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_entry_points(monkeypatch, toy=Toy())
    adapter = discover()["toy"]
    assert adapter.name == "toy"
    assert adapter.implements("b12x_linear_layer")
    assert not adapter.implements("b12x_moe_layer")
    assert adapter.cannot_express(CASE) == "no"
    assert adapter.linear_layer(CASE)(torch.ones(1)).item() == 9


def test_a_missing_hook_is_named() -> None:
    with pytest.raises(UnsupportedError, match="adapter toy: does not implement b12x_text_engine"):
        Adapter("toy", Toy()).text_engine("folder", options=None)  # type: ignore[arg-type]


def test_a_missing_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_entry_points(monkeypatch, toy=Toy())
    with pytest.raises(LookupError, match=r"offers the adapter vllm .*; found: none"):
        discover(["vllm"])
    assert list(discover(["toy"])) == ["toy"]


def test_a_hook_that_does_not_exist_is_refused() -> None:
    class Misspelt(Toy):
        @hookimpl
        def b12x_lineer_layer(self) -> None: ...

    with pytest.raises(Exception, match="b12x_lineer_layer"):
        Adapter("toy", Misspelt())
