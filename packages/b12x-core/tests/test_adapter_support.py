"""What adapters of engines have in common."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from b12x_core import ArgumentError
from b12x_core.adapter_support import (
    EngineHooks,
    command_line,
    has_tokenizer,
    installed,
    register_kinds,
    restored_environment,
    unserved,
)
from b12x_core.adapters import Adapter, LinearCase, TextEngineOptions

CASE = LinearCase(shards=(("o_proj", 4),), k=8, tensors={}, quantization=None, device="cuda:1")


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize(
    ("version", "served"),
    [("0.33.0", True), ("0.33.0+cu130", True), ("0.33.1", False), ("0.33.0rc1", False), ("0.34.0.dev3", False)],
)
def test_another_version_is_not_served(version: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"engine": version}[name])
    reason = unserved("engine", "Engine", "==0.33.0")
    assert installed("engine") == version
    assert (reason is None) == served
    if reason is not None:
        assert reason == f"this version serves Engine ==0.33.0, installed is {version}: install a matching pair"


def test_a_development_version_may_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.1.dev3")
    assert unserved("engine", "Engine", ">=1,<2") is None


def test_an_absent_engine_is_not_served() -> None:
    assert installed("b12x-no-such-engine") is None
    assert unserved("b12x-no-such-engine", "Engine", ">=1") == "Engine is not installed"


def test_every_kind_registers_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    module(monkeypatch, "pretend")
    for kind in ("attention", "linear"):
        module(monkeypatch, f"pretend.{kind}", register=lambda kind=kind: calls.append(kind))
    assert register_kinds("pretend", ("attention", "linear"), "Engine") is None
    assert calls == ["attention", "linear"]
    monkeypatch.setitem(sys.modules, "pretend.moe", None)
    reason = register_kinds("pretend", ("attention", "linear", "moe"), "Engine")
    assert reason is not None
    assert reason.startswith("Engine lacks an interface that the adapter needs (")
    assert "pretend.moe" in reason
    assert calls == ["attention", "linear"]


def test_hooks_are_served_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    module(monkeypatch, "pretend")
    module(monkeypatch, "pretend.linear", build=lambda case: ("linear", case))
    limits: Any = lambda options, checkpoint: f"not {checkpoint}"  # noqa: E731
    module(monkeypatch, "pretend.engine", start=lambda *given: given, cannot_express=limits)
    module(monkeypatch, "pretend.server", command=lambda *given: given)
    hooks = EngineHooks(
        "pretend", name="toy", engine="Toy", distribution="b12x-none", serves="==1", prepare=prepared.append
    )
    adapter = Adapter("toy", hooks)
    assert (adapter.info.name, adapter.info.engine, adapter.info.serves, adapter.info.installed) == (
        "toy",
        "Toy",
        "==1",
        None,
    )
    assert prepared == []
    assert adapter.linear_layer(CASE) == ("linear", CASE)
    assert adapter.cannot_express(CASE) is None
    assert prepared == ["cuda:1", "cuda:1"]
    options = TextEngineOptions()
    assert adapter.cannot_express(options, "folder") == "not folder"
    assert adapter.text_engine("folder", options) == ("folder", options)
    assert prepared[2:] == ["cpu", "cpu"]
    assert adapter.server_command("folder", 1234, options) == ("folder", 1234, options)
    assert len(prepared) == 4


def test_the_environment_is_restored_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_TEST_KEPT", "before")
    monkeypatch.setenv("B12X_TEST_DELETED", "before")
    monkeypatch.delenv("B12X_TEST_SET", raising=False)
    before = dict(os.environ)

    def change() -> None:
        with restored_environment(B12X_TEST_SET="1", B12X_TEST_KEPT="inside"):
            assert os.environ["B12X_TEST_SET"] == "1"
            assert os.environ["B12X_TEST_KEPT"] == "inside"
            del os.environ["B12X_TEST_DELETED"]
            os.environ["B12X_TEST_LEAKED"] = "1"
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert dict(os.environ) == before


def test_command_line() -> None:
    arguments = {"kv_cache_dtype": "auto", "enforce_eager": True, "size": 3, "left_out": None, "x": {"a": [1]}}
    assert command_line(arguments) == [
        "--kv-cache-dtype",
        "auto",
        "--enforce-eager",
        "--size",
        "3",
        "--x",
        '{"a": [1]}',
    ]
    with pytest.raises(ArgumentError, match="eager must be left out"):
        command_line({"eager": False})


def test_has_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert not has_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").touch()
    assert has_tokenizer(str(tmp_path))


def test_cases_know_what_engines_call_them() -> None:
    def case(*names: str, rows: tuple[int, ...] = (8, 4, 4), head_size: int | None = 4) -> SimpleNamespace:
        shards = tuple(zip(names, rows[: len(names)], strict=True))
        made = LinearCase(shards=shards, k=8, tensors={}, quantization=None, head_size=head_size)
        return SimpleNamespace(name=made.fused_name, qkv=made.is_qkv)

    assert vars(case("q_proj", "k_proj", "v_proj")) == {"name": "qkv_proj", "qkv": True}
    assert not case("q_proj", "k_proj", "v_proj", rows=(8, 4, 8)).qkv
    assert not case("q_proj", "k_proj", "v_proj", head_size=None).qkv
    assert vars(case("gate_proj", "up_proj")) == {"name": "gate_up_proj", "qkv": False}
    assert vars(case("k_proj", "q_proj", "v_proj")) == {"name": "fused_proj", "qkv": False}
    assert vars(case("o_proj")) == {"name": "o_proj", "qkv": False}
