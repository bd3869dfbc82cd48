"""What the runtime's tests share: kernels compiled once by the real compiler, and a worker that hands them out."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from b12x_core import runtime
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import compiling, loader, progress, store
from toys.configs import ToyConfig

ARCH = "sm_90a"
ADD = KernelSpec("add", ToyConfig(), "toys")
_folder = tempfile.TemporaryDirectory(prefix="b12x-toys-")


def toy(kernel: str = "add", **config: Any) -> KernelSpec:
    return KernelSpec(kernel, ToyConfig(**config), "toys")


@functools.cache
def built() -> Path:
    """A folder of the store with `ADD` for `ARCH` and all that `keep` keeps, made by the real compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("B12X_CACHE_DIR", _folder.name)
        done = runtime.compile_all([ADD], ARCH, keep=True, progress=progress.quiet)
        assert done.compiled == (ADD.name,)
        assert 1 << 26 < done.peak_bytes < 1 << 30
    return Path(_folder.name)


def built_entry() -> Path:
    """The folder of `ADD` in `built()`."""
    return store.Entry(ADD, ARCH).path(built())


class CopyingWorker(compiling.Worker):
    """Hands out the library of `ADD`, whatever is asked for: for tests of all that is around the compiler."""

    requests: list[str]

    def request(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request["spec"])
        shutil.copy(built_entry() / "kernel.so", request["folder"])
        return {"seconds": 0.0, "peak_bytes": 0}


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store; nothing is loaded or frozen, before and after."""
    built()  # by the real worker, and before anything is counted
    monkeypatch.setenv("B12X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "_frozen", False)
    monkeypatch.setattr(compiling, "_count", 0)
    return tmp_path / "cache"


@pytest.fixture
def requests(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`fresh`, and what the `CopyingWorker` in place of the compiler was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(CopyingWorker, "requests", asked, raising=False)
    monkeypatch.setattr(compiling, "Worker", CopyingWorker)
    return asked
