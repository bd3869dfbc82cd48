"""From a kernel to its launch function: where there is no driver, as far as loading and the checks of arguments."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from b12x_core import capabilities, runtime
from b12x_core.errors import FrozenError, MissingLibraryError, UnsupportedError
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import DeviceFacts, devices, libraries, loader, progress, store
from toy_support import ADD, ARCH, built, fresh, requests, toy

__all__ = ["fresh", "requests"]

H200 = DeviceFacts(ARCH, 132, 232448)


@pytest.fixture
def h200() -> object:
    with devices.fake(H200):
        yield


def test_a_kernel_is_loaded_once_and_checks_its_arguments(
    fresh: Path, h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B12X_CACHE_DIR", str(built()))
    launch = runtime.get(ADD, "cuda:0")
    assert runtime.get(toy(), "cuda:1") is launch
    assert runtime.counts() == runtime.Counts(compiled=0, loaded=1)
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        launch(x, x, 4)
    with pytest.raises(TypeError, match="3 parameters"):
        launch(x)


def test_threads_get_the_same_function(fresh: Path, h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_CACHE_DIR", str(built()))
    barrier = threading.Barrier(8)

    def one(_: int) -> loader.Launch:
        barrier.wait()
        return runtime.get(ADD)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(one, range(8)))) == 1
    assert runtime.counts().loaded == 1


def test_what_is_missing_is_compiled_on_first_use(requests: list[str], h200: None) -> None:
    runtime.get(ADD)
    runtime.get(ADD)
    assert len(requests) == 1
    assert runtime.counts() == runtime.Counts(compiled=1, loaded=1)


def test_warm_compiles_and_loads(requests: list[str], h200: None) -> None:
    specs = [toy(addend=n) for n in range(3)]
    runtime.warm([*specs, specs[0]], progress=progress.quiet)
    assert runtime.counts() == runtime.Counts(compiled=3, loaded=3)
    with runtime.frozen():
        runtime.warm(specs)
        assert runtime.get(specs[1]) is runtime.get(specs[1])
    assert len(requests) == 3


def test_frozen_means_that_nothing_compiles(requests: list[str], h200: None) -> None:
    loaded, present, missing = toy(addend=1), toy(addend=2), toy(addend=3)
    runtime.compile_all([loaded, present], ARCH, progress=progress.quiet)
    runtime.get(loaded)
    runtime.freeze()
    runtime.get(loaded)
    runtime.get(present)
    for refused in (lambda: runtime.get(missing), lambda: runtime.warm([missing])):
        with pytest.raises(FrozenError) as caught:
            refused()
        assert missing.name in str(caught.value)
        assert ARCH in str(caught.value)
        assert runtime.command(missing, ARCH) in str(caught.value)
    runtime.unfreeze()
    runtime.get(missing)
    with runtime.frozen(), pytest.raises(FrozenError):
        runtime.get(toy(addend=4))
    runtime.get(toy(addend=4))


def test_the_command_names_the_kernel() -> None:
    program, verb, *arguments = shlex.split(runtime.command(ADD, ARCH))
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (program, verb) == ("b12x", "compile")
    assert options["--arch"] == ARCH
    assert KernelSpec.from_json(options["--kernel"]) == ADD


def test_first_use_within_capture_is_refused(requests: list[str], h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.get(ADD)
    monkeypatch.setattr(loader, "_capturing", lambda: True)
    runtime.get(ADD)
    for refused in (lambda: runtime.get(toy(addend=2)), lambda: runtime.warm([toy(addend=2)])):
        with pytest.raises(FrozenError, match=r"add-2-t128 for sm_90a .* while a CUDA graph is captured"):
            refused()
    assert len(requests) == 1


FIRST_START = """
import json, sys
from b12x_core import runtime
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import devices, keys
spec = KernelSpec.from_json(sys.argv[1])
with devices.fake(devices.DeviceFacts("sm_90a", 132, 232448)):
    runtime.get(spec)
compilers = [name for name in sys.modules if name.partition(".")[0] == "cutlass"]
print(json.dumps([keys.key(spec, "sm_90a"), runtime.counts().compiled, runtime.counts().loaded, compilers]))
"""


def start(cache: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", FIRST_START, ADD.to_json()],
        env=os.environ | {"B12X_CACHE_DIR": str(cache), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_eight_processes_compile_once_and_the_next_start_never_does(tmp_path: Path) -> None:
    """With the real compiler, which none of them imports."""
    processes = [start(tmp_path) for _ in range(8)]
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    key = store.Entry(ADD, ARCH).key
    assert sorted(answers) == [[key, 0, 1, []]] * 7 + [[key, 1, 1, []]]
    out, err = start(tmp_path).communicate(timeout=60)
    assert json.loads(out) == [key, 0, 1, []], err


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tvm_ffi", None)
        with pytest.raises(MissingLibraryError, match=r"apache-tvm-ffi .* pip install"):
            libraries.load()
    with monkeypatch.context() as patch:
        patch.setattr(libraries, "_candidates", lambda: ["libb12x_absent.so"])
        with pytest.raises(MissingLibraryError, match=r"libcute_dsl_runtime.so, .*libb12x_absent.so.* pip install"):
            libraries.load()
    libraries.load()


def test_the_runtime_library_may_lie_beside_the_kernels(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.mkdir()
    (fresh / libraries.CUTE_RUNTIME).touch()
    assert libraries._candidates()[-2:] == [str(fresh / libraries.CUTE_RUNTIME), libraries.CUTE_RUNTIME]
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    assert libraries._candidates() == [str(fresh / libraries.CUTE_RUNTIME), libraries.CUTE_RUNTIME]


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((12, 0), "sm_120a"), ((12, 1), "sm_121a")])
def test_facts_of_a_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    properties = SimpleNamespace(
        name="a GPU",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=48,
        shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400,
    )
    monkeypatch.setattr(devices, "_facts", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert runtime.facts("cuda:1") == DeviceFacts(arch, 48, 101376, 102400)
    assert capabilities.tier_of("cuda:1")[0] is not None


def test_every_capability_with_a_tier_has_an_architecture() -> None:
    assert set(devices.ARCHITECTURES) == set(capabilities._TIER_OF_CAPABILITY)


def test_another_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_facts", {})
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    )
    with pytest.raises(UnsupportedError, match=r"cuda:0 \(NVIDIA A100\) has compute capability 8\.0; .*12\.1"):
        runtime.facts(0)
