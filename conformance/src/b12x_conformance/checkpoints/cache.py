"""The folder that keeps generated checkpoints: built once a key, whole or not there at all, however many ask.

A folder is named after what it holds and a digest of everything that determines its content: the recipe, and the
source of the modules that carry it out. So an edit of a codec never serves a checkpoint made before it. Nothing here
is precious: the whole cache may be deleted whenever no test runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from b12x_conformance import environment

console = Console(stderr=True)
"""Where long steps report. Standard error, so that a caller's own output stays clean."""


def root() -> Path:
    """The cache folder that `B12X_CONFORMANCE_CACHE` names."""
    return Path(environment.CACHE.get()).expanduser()


def digest(recipe: Mapping[str, Any], modules: Sequence[ModuleType] = ()) -> str:
    """12 hexadecimal digits that stand for a recipe (JSON values) and the source of the modules that follow it."""
    state = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for module in modules:
        state.update(inspect.getsource(module).encode())
    return state.hexdigest()[:12]


def folder(
    name: str, recipe: Mapping[str, Any], build: Callable[[Path], None], *, modules: Sequence[ModuleType] = ()
) -> Path:
    """The cached folder of a recipe, built by `build(empty folder)` if it is not there.

    Of several processes that ask for the same folder one builds and the others wait. A build that fails leaves
    nothing behind.

    Args:
        name: readable part of the folder's name.
        recipe: what determines the content, as JSON values.
        build: fills the folder it is given.
        modules: modules whose source determines the content too.
    """
    target = root() / f"{name}-{digest(recipe, modules)}"
    if target.is_dir():
        return target
    with _locked(target):
        if target.is_dir():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with console.status(f"Making {name}"), torch.inference_mode():
                build(scratch)
            # mkdtemp makes a private folder; a cache shared by several users must be readable.
            scratch.chmod(0o755)
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        console.print(f"Made {name}: {target}", highlight=False)
    return target


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of one folder. The kernel drops it with the process, so a killed build blocks nobody."""
    locks = root() / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / target.name, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
