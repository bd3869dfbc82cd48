"""The `b12x` command as a user runs it."""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace

import pytest
from b12x_core import SCHEMES, cli
from b12x_core.adapters import AdapterInfo, hookimpl
from b12x_core.cli import app
from typer.testing import CliRunner


def install(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    class Plugin:
        @hookimpl
        def b12x_adapter_info(self) -> AdapterInfo:
            return AdapterInfo("toy", "Toy", "==1.2.*", installed)

    points = [SimpleNamespace(name="toy", load=Plugin)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)


@pytest.mark.parametrize(
    ("installed", "code", "problem"),
    [("1.2.3", 0, None), ("1.3", 1, "serves Toy ==1.2.*; installed is 1.3"), (None, 1, "installed is none")],
)
def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch, installed: str | None, code: int, problem: str | None) -> None:
    install(monkeypatch, installed)
    monkeypatch.setattr(cli, "_devices", lambda report: None)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == code
    assert [problem in found for found in report["problems"]] == ([True] if problem else [])
    assert report["versions"]["torch"]


def test_doctor_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "1.2.3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == [
        "no CUDA device is visible: only the plain torch reference runs here"
    ]


def test_doctor_names_an_adapter_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> object:
        raise ImportError("libfoo.so is missing")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="x", load=load)])
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "adapter x: cannot be loaded: ImportError: libfoo.so is missing" in result.stdout


def test_support_lists_every_scheme() -> None:
    result = CliRunner().invoke(app, ["support"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name in SCHEMES:
        assert f" {name} " in result.stdout
