"""The folders of compiled kernels.

`FOLDER/<arch>/<kernel>-<key>/` holds `kernel.so` and `meta.json`. An entry appears whole, by a rename, or not at all;
what was damaged since is found by its checksum, never loaded, and replaced. A folder that cannot be written serves as
a bundle of kernels that were compiled elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from b12x_core import environment
from b12x_core.errors import CompileError
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import keys

log = logging.getLogger("b12x")

LIBRARY = "kernel.so"
META = "meta.json"
FUNCTION = "launch"
"""What the function in the library is called."""

STALE_SECONDS = 3600.0
"""After this a folder that somebody left half-written is removed; no kernel compiles that long."""


def folders() -> list[Path]:
    """The folders that `B12X_CACHE_DIR` names, in the order in which they are searched."""
    named = environment.CACHE_DIR.get() or environment.CACHE_DIR.default
    return [Path(name).expanduser() for name in named.split(os.pathsep) if name]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def writable_folder() -> Path:
    """The folder that gets what is compiled.

    Raises:
        CompileError: if none can be written.
    """
    for folder in folders():
        if _writable(folder):
            return folder
    named = os.pathsep.join(map(str, folders()))
    raise CompileError(f"no folder of {environment.CACHE_DIR.name}={named} can be written to")


@dataclass(frozen=True)
class Entry:
    """Where a kernel compiled for an architecture belongs, in every folder."""

    spec: KernelSpec
    arch: str

    @property
    def key(self) -> str:
        """The whole key."""
        return keys.key(self.spec, self.arch)

    def path(self, folder: Path) -> Path:
        """Its own folder within a folder of the store."""
        return folder / self.arch / f"{self.spec.name}-{self.key[:16]}"

    def find(self) -> Path | None:
        """The shared library, checked against its checksum; None if no folder has it sound.

        What is damaged stays until `publish` replaces it: only who holds the lock may remove anything.
        """
        for folder in folders():
            path = self.path(folder)
            if not path.exists():
                continue
            damage = self._damage(path)
            if damage is None:
                return path / LIBRARY
            log.warning("the compiled kernel %s is %s and is not used", path, damage)
        return None

    def _damage(self, path: Path) -> str | None:
        try:
            meta = json.loads((path / META).read_text())
            content = (path / LIBRARY).read_bytes()
            if meta["key"] != self.key:
                return "another one"
            if meta["sha256"] != hashlib.sha256(content).hexdigest():
                return "damaged"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"incomplete ({type(error).__name__})"
        return None

    def publish(self, partial: Path, facts: dict[str, Any]) -> Path:
        """Make a folder that holds `kernel.so` the entry; returns the shared library.

        Args:
            partial: from `partial`, in the same folder of the store.
            facts: what else to note about the kernel, for people.
        """
        meta = {
            "key": self.key,
            "sha256": hashlib.sha256((partial / LIBRARY).read_bytes()).hexdigest(),
            "arch": self.arch,
            "compiler": keys.compiler_version(),
            "kernel": json.loads(self.spec.to_json()),
            **facts,
        }
        (partial / META).write_text(json.dumps(meta, indent=2) + "\n")
        for file in (*partial.iterdir(), partial):
            _sync(file)
        path = self.path(partial.parent.parent)
        shutil.rmtree(path, ignore_errors=True)
        partial.chmod(0o755)
        partial.rename(path)
        _sync(path.parent)
        return path / LIBRARY

    @contextlib.contextmanager
    def partial(self, folder: Path) -> Iterator[Path]:
        """An empty folder to build in; removed if it was not published."""
        parent = self.path(folder).parent
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(".partial-*"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def lock(self, folder: Path) -> filelock.BaseFileLock:
        """The lock under which the entry is built. The kernel releases it when its holder dies."""
        path = self.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(path.with_name(f".{path.name}.lock"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
