"""From a kernel and a device to a function that launches it, and the rule that nothing compiles once serving began.

A launch function takes tensors and ints by position. It checks dtypes, shapes and that all tensors are on one device,
makes that device current for the launch if it is not, and launches on torch's current stream of that device. It may be
called by several threads at once. CUDA gets the code at the first launch, which takes 0.1 ms.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from b12x_core.errors import CompileError, FrozenError
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import compiling, devices, libraries, store
from b12x_core.runtime.progress import Progress

Launch = Callable[..., None]

_loaded: dict[tuple[KernelSpec, str], Launch] = {}
_lock = threading.Lock()
_frozen = False


@dataclass(frozen=True)
class Counts:
    """What this process did.

    Attributes:
        compiled: kernels that it had compiled.
        loaded: kernels that it loaded.
    """

    compiled: int
    loaded: int


def get(spec: KernelSpec, device: torch.device | str | int | None = None) -> Launch:
    """The function that launches a kernel on a device, by default the current one.

    The first use in a process loads the kernel, and compiles it if no folder of `B12X_CACHE_DIR` has it.

    Raises:
        FrozenError: the kernel was not used before and a CUDA graph is being captured, or it would have to be
            compiled after `freeze`.
        CompileError: it cannot be compiled.
        MissingLibraryError: a library that launching needs is not installed.
        UnsupportedError: no kernel is compiled for the device.
    """
    arch = devices.facts(device).arch
    launch = _loaded.get((spec, arch))
    return _first_use(spec, arch) if launch is None else launch


def warm(
    specs: Iterable[KernelSpec],
    device: torch.device | str | int | None = None,
    *,
    progress: Callable[[int, str], Progress] | None = None,
) -> None:
    """Load kernels for a device, after compiling, several at once, those that are missing.

    Args:
        specs: kernels.
        device: by default the current one.
        progress: as of `compile_all`.

    Raises:
        As `get`.
    """
    arch = devices.facts(device).arch
    wanted = [spec for spec in dict.fromkeys(specs) if (spec, arch) not in _loaded]
    if wanted and not _frozen and not _capturing():
        compiling.compile_all(wanted, arch, progress=progress)
    for spec in wanted:
        get(spec, device)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _first_use(spec: KernelSpec, arch: str) -> Launch:
    if _capturing():
        raise FrozenError(
            f"the kernel {spec.name} for {arch} is used for the first time while a CUDA graph is captured; run the "
            f"shape once before, and build the kernel ahead of time with: {command(spec, arch)}"
        )
    entry = store.Entry(spec, arch)
    library = entry.find()
    if library is None:
        if _frozen:
            raise FrozenError(
                f"the kernel {spec.name} for {arch} is missing, and compiling is forbidden since start-up ended; "
                f"build it ahead of time with: {command(spec, arch)}"
            )
        compiling.compile_all([spec], arch)
        library = entry.find()
        if library is None:
            raise CompileError(f"the kernel {spec.name} for {arch} was compiled, but is no longer in the store")
    return _load(spec, arch, library)


def _load(spec: KernelSpec, arch: str, library: Path) -> Launch:
    with _lock:
        launch: Launch | None = _loaded.get((spec, arch))
        if launch is None:
            launch = _loaded[spec, arch] = libraries.load().load_module(str(library))[store.FUNCTION]
        return launch


def argument(tensor: torch.Tensor) -> Any:
    """A tensor as launch functions take it, for one that is passed many times: converting takes 0.4 us a call.

    At least one other argument of each launch must be a tensor of torch, whose stream and device decide.
    """
    return libraries.load().from_dlpack(tensor)


def command(spec: KernelSpec, arch: str) -> str:
    """The shell command that builds a kernel."""
    return f"b12x compile --arch {arch} --kernel {shlex.quote(spec.to_json())}"


def freeze() -> None:
    """From now on a kernel that would have to be compiled raises `FrozenError`."""
    global _frozen
    _frozen = True


def unfreeze() -> None:
    """Allow compiling again."""
    global _frozen
    _frozen = False


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Within this context compiling is forbidden."""
    global _frozen
    before, _frozen = _frozen, True
    try:
        yield
    finally:
        _frozen = before


def counts() -> Counts:
    """What this process did."""
    return Counts(compiling.compiled_count(), len(_loaded))
