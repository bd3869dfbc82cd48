"""The store: whole entries or none, checked, found in several folders; one build however many ask."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from b12x_core import runtime
from b12x_core.errors import CompileError
from b12x_core.runtime import compiling, store
from b12x_core.runtime.progress import quiet
from toy_support import ADD, ARCH, CopyingWorker, built, built_entry, fresh, requests, toy

__all__ = ["fresh", "requests"]

ENTRY = store.Entry(ADD, ARCH)


def compile_add() -> compiling.Compiled:
    return runtime.compile_all([ADD], ARCH, progress=quiet)


def test_an_entry_says_what_it_is() -> None:
    meta = json.loads((built_entry() / "meta.json").read_text())
    assert meta["key"] == ENTRY.key
    assert (meta["arch"], meta["compiler"]) == (ARCH, "4.8.0")
    assert meta["kernel"]["fields"] == {"addend": 1, "threads": 128, "note": ""}
    assert built_entry().name == f"add-1-t128-{ENTRY.key[:16]}"
    assert {file.name for file in built_entry().iterdir()} == {store.LIBRARY, store.META, *compiling.KEPT}
    assert ".visible .entry" in (built_entry() / "kernel.ptx").read_text()
    assert (built_entry() / "kernel.cubin").read_bytes().startswith(b"\x7fELF")


def truncate(path: Path) -> None:
    file = path / store.LIBRARY
    file.write_bytes(file.read_bytes()[:-100])


def alter(path: Path) -> None:
    content = bytearray((path / store.LIBRARY).read_bytes())
    content[len(content) // 2] ^= 1
    (path / store.LIBRARY).write_bytes(content)


def empty(path: Path) -> None:
    (path / store.LIBRARY).write_bytes(b"")


def lose_library(path: Path) -> None:
    (path / store.LIBRARY).unlink()


def lose_meta(path: Path) -> None:
    (path / store.META).unlink()


def truncate_meta(path: Path) -> None:
    (path / store.META).write_text('{"key": "')


def other_key(path: Path) -> None:
    meta = json.loads((path / store.META).read_text())
    (path / store.META).write_text(json.dumps(meta | {"key": "0" * 64}))


@pytest.mark.parametrize(
    "damage", [truncate, alter, empty, lose_library, lose_meta, truncate_meta, other_key], ids=lambda f: f.__name__
)
def test_a_damaged_entry_is_built_again(
    requests: list[str], fresh: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert compile_add().compiled == (ADD.name,)
    sound = ENTRY.find()
    assert sound is not None
    content = sound.read_bytes()
    damage(ENTRY.path(fresh))
    with caplog.at_level(logging.WARNING, "b12x"):
        assert ENTRY.find() is None
    assert str(ENTRY.path(fresh)) in caplog.text
    assert compile_add().compiled == (ADD.name,)
    assert len(requests) == 2
    assert sound.read_bytes() == content
    assert compile_add().present == (ADD.name,)


def test_what_was_left_half_written_is_never_found_and_goes_away(requests: list[str], fresh: Path) -> None:
    left = fresh / ARCH / ".partial-left"
    recent = fresh / ARCH / ".partial-recent"
    for path in (left, recent):
        path.mkdir(parents=True)
        shutil.copy(built_entry() / store.LIBRARY, path)
    os.utime(left, (0, 0))
    assert ENTRY.find() is None
    compile_add()
    assert [path.name for path in (fresh / ARCH).glob(".partial-*")] == [recent.name]


def test_a_failed_build_leaves_nothing(requests: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyingWorker, "request", lambda self, **request: {"error": "the compiler said no"})
    with pytest.raises(CompileError, match="the compiler said no"):
        compile_add()
    assert [path.name for path in (fresh / ARCH).iterdir() if not path.name.endswith(".lock")] == []


def test_folders_are_searched_in_order_and_the_first_writable_one_is_written(
    requests: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impossible = Path("/proc/b12x")
    monkeypatch.setenv("B12X_CACHE_DIR", os.pathsep.join(map(str, (impossible, fresh / "a", built(), fresh / "b"))))
    assert ENTRY.find() == built_entry() / store.LIBRARY
    assert compile_add().present == (ADD.name,)
    other = toy(addend=2)
    runtime.compile_all([other], ARCH, progress=quiet)
    assert store.Entry(other, ARCH).find() == store.Entry(other, ARCH).path(fresh / "a") / store.LIBRARY
    monkeypatch.setenv("B12X_CACHE_DIR", str(impossible))
    with pytest.raises(CompileError, match="B12X_CACHE_DIR=/proc/b12x"):
        compile_add()


def test_a_read_only_bundle_serves(fresh: Path, requests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a user who may write nowhere, and without a trace in the bundle."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        shutil.copytree(built(), bundle, ignore=shutil.ignore_patterns(".*"))
        before = sorted(bundle.rglob("*"))
        for path in (Path(folder), *before, bundle):
            path.chmod(0o555 if path.is_dir() else 0o444)
        monkeypatch.setenv("B12X_CACHE_DIR", str(bundle))
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            assert not os.access(bundle, os.W_OK, effective_ids=True)
            assert compile_add().present == (ADD.name,)
            assert ENTRY.find() == ENTRY.path(bundle) / store.LIBRARY
            with pytest.raises(CompileError, match="can be written"):
                runtime.compile_all([toy(addend=3)], ARCH, progress=quiet)
        finally:
            os.seteuid(user)
            for path in (Path(folder), bundle, bundle / ARCH):
                path.chmod(0o755)
        assert sorted(bundle.rglob("*")) == before
    assert requests == []


def test_threads_of_one_process_build_a_kernel_once(requests: list[str]) -> None:
    done: list[compiling.Compiled] = []
    threads = [threading.Thread(target=lambda: done.append(compile_add())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(requests) == 1
    assert sorted(len(one.compiled) for one in done) == [0] * 7 + [1]


HOLDER = """
import sys, time, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_holder_of_the_lock_blocks_nobody(requests: list[str], fresh: Path) -> None:
    lock = ENTRY.lock(fresh).lock_file
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        results: list[compiling.Compiled] = []
        waiting = threading.Thread(target=lambda: results.append(compile_add()))
        waiting.start()
        time.sleep(0.5)
        assert (requests, results) == ([], [])
        holder.send_signal(signal.SIGKILL)
        waiting.join(10)
        assert [one.compiled for one in results] == [(ADD.name,)]
    finally:
        holder.kill()
        with holder:
            pass


def test_while_one_kernel_is_built_elsewhere_the_others_are_built_here(requests: list[str], fresh: Path) -> None:
    others = [toy(addend=n) for n in range(2, 5)]
    lock = ENTRY.lock(fresh)
    with lock:
        results: list[compiling.Compiled] = []
        every = [ADD, *others]
        busy = threading.Thread(target=lambda: results.append(runtime.compile_all(every, ARCH, progress=quiet)))
        busy.start()
        deadline = time.monotonic() + 10
        while len(requests) < len(others) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(requests) == sorted(other.to_json() for other in others)
        # what the holder would do
        with ENTRY.partial(fresh) as partial:
            shutil.copy(built_entry() / store.LIBRARY, partial)
            ENTRY.publish(partial, {})
    busy.join(10)
    assert [one.present for one in results] == [(ADD.name,)]
    assert len(requests) == len(others)
