"""Registration with vLLM: once, all of it, or one line that says why not."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path

import b12x_vllm
import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

OURS = "b12x_vllm.attention.B12xAttentionBackend"


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process that has not registered yet; lists the kinds of layer as they register."""
    calls: list[str] = []
    monkeypatch.setattr(b12x_vllm, "_done", False)
    for kind in ("attention", "linear", "moe"):
        monkeypatch.setattr(f"b12x_vllm.{kind}.register", lambda kind=kind: calls.append(kind))
    return calls


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "vllm.plugins.b12x"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    # vLLM keeps its loggers from the root logger, where pytest listens.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def test_entry_point_is_found_and_registers_everything_once(
    unregistered: list[str], log: pytest.LogCaptureFixture
) -> None:
    [point] = [p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "b12x"]
    point.load()()
    point.load()()
    assert unregistered == ["attention", "linear", "moe"]
    assert lines(log) == []


def test_the_flag_of_vllm_leads_to_the_backend() -> None:
    b12x_vllm.register()
    assert AttentionBackendEnum.B12X.get_path() == OURS
    assert AttentionBackendEnum.B12X.get_class().get_name() == "B12X"


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0rc1", "0.33.1", "0.34.0.dev3"])
def test_another_engine_version_is_left_alone_with_one_line(
    version: str, unregistered: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    b12x_vllm.register()
    assert unregistered == []
    [line] = lines(log)
    assert version in line
    assert "==0.33.0" in line
    assert "--linear-backend b12x" in line


def test_a_local_version_label_is_the_same_engine(
    unregistered: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.33.0+cu130")
    b12x_vllm.register()
    assert unregistered == ["attention", "linear", "moe"]
    assert lines(log) == []


def test_missing_kernels_are_one_line(
    unregistered: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "b12x_core"]:
        monkeypatch.setitem(sys.modules, name, None)
    b12x_vllm.register()
    assert unregistered == []
    [line] = lines(log)
    assert "pip install b12x-core" in line


def test_a_kind_that_cannot_be_imported_keeps_all_from_registering(
    unregistered: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "b12x_vllm.moe", None)
    b12x_vllm.register()
    assert unregistered == []
    [line] = lines(log)
    assert "b12x_vllm.moe" in line


def test_hooks_import_nothing_of_the_engine() -> None:
    code = "import sys, b12x_vllm.hooks as h; print(h.HOOKS.b12x_adapter_info(), 'vllm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("False")
    assert "name='vllm'" in result.stdout


BESIDE_UPSTREAM = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.utils.b12x import has_b12x
assert has_b12x(), "the stand-in for the upstream package was not found"
import vllm.model_executor.kernels.linear as linear
from vllm.model_executor.layers.fused_moe.oracle import mxfp4, nvfp4
from vllm.v1.attention.backends.registry import AttentionBackendEnum
served = [*linear._LINEAR_BACKEND_KERNEL_MAP["b12x"], linear.B12xNvFp4W4A16LinearKernel]
served += nvfp4.backend_to_kernel_cls(nvfp4.NvFp4MoeBackend.B12X)
served += [kernel for backend in mxfp4.B12X_BACKENDS for kernel in mxfp4.backend_to_kernel_cls(backend)]
served.append(AttentionBackendEnum.B12X.get_class())
print(" ".join(sorted({kernel.__module__.partition(".")[0] for kernel in served})))
"""


def test_installed_beside_the_upstream_package_ours_serves_the_flags(tmp_path: Path) -> None:
    """A stand-in with the upstream package's import name; vLLM looks for it when its modules are imported."""
    (tmp_path / "b12x").mkdir()
    (tmp_path / "b12x" / "__init__.py").touch()
    child = subprocess.run(
        [sys.executable, "-c", BESIDE_UPSTREAM],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "B12X_CONFORMANCE_CPU": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.split("\n")[-2] == "b12x_vllm"
