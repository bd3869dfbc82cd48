"""The worker process, what it says when it fails, and how many may run."""

from __future__ import annotations

import io
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from b12x_core import runtime
from b12x_core.errors import CompileError
from b12x_core.runtime import compiling, progress, resources, store, worker
from toy_support import ADD, ARCH, CopyingWorker, built_entry, fresh, requests, toy

__all__ = ["fresh", "requests"]


def test_failures_say_why_and_the_others_are_compiled(fresh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One worker: a kernel that the compiler refuses, a death, and one kernel that is compiled by its successor."""
    broken, killed, good = toy("broken", threads=32), toy("killed"), toy(addend=7)
    with pytest.raises(CompileError) as caught:
        runtime.compile_all([broken, killed, good], ARCH, workers=1)
    text = str(caught.value)
    assert text.startswith(f"2 of 3 kernels could not be compiled for {ARCH}:\n")
    assert re.search(r"broken-1-t32 \(ToyConfig\(addend=1, threads=32, note=''\)\): ", text)
    assert "no_such_value" in text
    assert "\x1b" not in text
    assert "killed-1-t128" in text
    assert re.search(r"killed by signal 9 \(.*memory.*\): last words", text)
    assert good.name not in text
    assert store.Entry(good, ARCH).find() is not None
    assert runtime.counts().compiled == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("b12x:")] == [
        f"b12x: 1/3 failed to compile {broken.name} for {ARCH}",
        f"b12x: 2/3 failed to compile {killed.name} for {ARCH}",
        f"b12x: 3/3 compiled {good.name} for {ARCH}",
    ]


def test_the_library_is_bound_to_no_machine() -> None:
    """No folders to search in, only two names to look up; no instructions that a CPU of 2009 lacks."""
    library = str(built_entry() / store.LIBRARY)
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert not re.search("RPATH|RUNPATH", dynamic)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    assert needed == {"libcute_dsl_runtime.so", "libtvm_ffi.so"}
    code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "xmm" in code or "aarch64" in code
    assert not re.search(r"\bv(mov|xor)\w+|%[yz]mm", code)
    content = (built_entry() / store.LIBRARY).read_bytes()
    for folder in (sys.prefix, str(built_entry().parents[1]), str(Path(worker.__file__).parent)):
        assert folder.encode() not in content


def test_an_interrupt_ends_the_batch(requests: list[str]) -> None:
    """Also kernels that wait: nothing starts after it, and the caller gets it."""

    class Interrupting(progress.Quiet):
        def end(self, name: str, error: str | None) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)

    with pytest.raises(KeyboardInterrupt):
        runtime.compile_all(
            [toy(addend=n) for n in range(50)], ARCH, progress=lambda total, arch: Interrupting(), workers=1
        )
    assert len(requests) <= 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("b12x-compile")]


def test_a_source_that_changed_after_it_was_read_is_refused(tmp_path: Path) -> None:
    request = {"spec": ADD.to_json(), "key": "0" * 64, "arch": ARCH, "folder": str(tmp_path), "keep": False}
    assert "source was changed" in worker.answer(request)["error"]
    assert list(tmp_path.iterdir()) == []


def test_without_the_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: None)
    key = store.Entry(ADD, ARCH).key
    request = {"spec": ADD.to_json(), "key": key, "arch": ARCH, "folder": str(tmp_path), "keep": False}
    assert "pip install 'nvidia-cutlass-dsl==4.8.0'" in worker.answer(request)["error"]


def test_linking_without_a_linker_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match="needs a C compiler"):
        worker._link(tmp_path / "kernel.o", tmp_path / "kernel.so")


def test_keep_builds_again_what_lacks_it(requests: list[str], fresh: Path) -> None:
    for keep, built in ((False, 1), (False, 1), (True, 2)):
        runtime.compile_all([ADD], ARCH, keep=keep, progress=progress.quiet)
        assert len(requests) == built


def test_a_worker_that_grew_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is what a real worker says; only the bound is lowered, below what Python itself takes."""
    with compiling.Worker(ARCH) as one:
        bad = {"spec": "{}", "key": "", "arch": ARCH, "folder": "", "keep": False}
        assert "no kernel is described" in one.request(**bad)["error"]
        process = one._process
        assert process is not None
        assert "no kernel is described" in one.request(**bad)["error"]
        assert one._process is process
        answer = '{"seconds": 0, "peak_bytes": %d}\n'
        for peak, kept in ((resources.WORKER_BYTES // 2, True), (resources.WORKER_BYTES, False)):
            with monkeypatch.context() as patch:
                patch.setattr(process, "stdout", io.StringIO(answer % peak))
                one.request(**bad)
            assert (one._process is process) == kept
    assert process.wait(10) == 0


def machine(root: Path, available: int, group: str = "0::/\n", **files: str) -> Path:
    """A root folder with what is read about memory; names of control group files have / as __."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": group,
        **{f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GIB = 1 << 30
V2 = {"memory.current": str(3 * GIB), "memory.stat": f"anon 5\ninactive_file {GIB}\n"}
V1 = {
    "memory__memory.limit_in_bytes": str(4 * GIB),
    "memory__memory.usage_in_bytes": str(2 * GIB),
    "memory__memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
}


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {**V2, "memory.max": "max"}, 64),
        ("0::/\n", {**V2, "memory.max": str(10 * GIB)}, 8),
        ("0::/\n", {**V2, "memory.max": str(2 * GIB)}, 0),
        ("0::/of/the/host\n", {**V2, "memory.max": str(10 * GIB)}, 8),
        ("0::/a/b\n", {"a__memory.max": str(5 * GIB), "a__memory.current": "0", "a__b__memory.max": "max"}, 5),
        ("3:cpu:/x\n2:memory:/docker/1\n", V1, 3),
    ],
)
def test_memory_is_what_the_control_group_allows(
    tmp_path: Path, group: str, files: dict[str, str], expected: int
) -> None:
    root = machine(tmp_path, 64 * GIB, group, **files)
    assert resources.available_memory(root) == expected * GIB


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/a\n", {"a__cpu.max": "350000 100000"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/\n", {"cpu__cpu.cfs_quota_us": "200000", "cpu__cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/\n", {"cpu__cpu.cfs_quota_us": "-1", "cpu__cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_cores_are_what_the_control_group_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda process: set(range(64)))
    assert resources.cores(machine(tmp_path, GIB, group, **files)) == expected


def test_unknown_memory_limits_nothing(tmp_path: Path) -> None:
    assert resources.available_memory(tmp_path) > 1 << 50
    assert 0 < resources.available_memory() < 1 << 50


@pytest.mark.parametrize(
    ("cores", "memory", "kernels", "expected"), [(8, 64, 100, 8), (8, 3, 100, 3), (8, 64, 2, 2), (8, 0, 100, 1)]
)
def test_workers_are_capped(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, kernels: int, expected: int
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: cores)
    monkeypatch.setattr(resources, "available_memory", lambda: memory * resources.WORKER_BYTES)
    assert resources.worker_limit(kernels) == expected


def test_no_more_workers_than_memory_allows_run_at_once(requests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[CopyingWorker] = []

    class Counted(CopyingWorker):
        def __enter__(self) -> Counted:
            started.append(self)
            return self

    monkeypatch.setattr(compiling, "Worker", Counted)
    monkeypatch.setattr(resources, "cores", lambda: 64)
    monkeypatch.setattr(resources, "available_memory", lambda: 3 * resources.WORKER_BYTES)
    done = runtime.compile_all([toy(addend=n) for n in range(12)], ARCH, progress=progress.quiet)
    assert (len(done.compiled), len(requests), len(started)) == (12, 12, 3)


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(
    requests: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.compile_all([ADD], ARCH)
    assert capsys.readouterr().err == f"b12x: 1/1 compiled {ADD.name} for {ARCH}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    runtime.compile_all([toy(addend=n) for n in (2, 3)], ARCH)
    text = capsys.readouterr().err
    assert f"compiling for {ARCH}" in text
    assert "2/2" in text
