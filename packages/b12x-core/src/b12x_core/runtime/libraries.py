"""The two libraries that launching needs: TVM-FFI, and the runtime library of CuTe DSL. Neither is the compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from b12x_core.errors import MissingLibraryError
from b12x_core.runtime import keys, store

CUTE_RUNTIME = "libcute_dsl_runtime.so"
INSTALL = f"pip install apache-tvm-ffi '{keys.COMPILER}[cu13]=={keys.COMPILER_VERSION}'"


def _candidates() -> list[str]:
    """Where the runtime library may be: in NVIDIA's wheels, beside compiled kernels, where the loader looks."""
    found: list[Path] = []
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for package in (spec and spec.submodule_search_locations) or ():
        found += sorted(Path(package).glob(f"*/lib/{CUTE_RUNTIME}"))
    # wheels for several CUDA versions can be installed together
    cuda = f"cu{(torch.version.cuda or '').partition('.')[0]}"
    found.sort(key=lambda path: path.parent.parent.name != cuda)
    found += [path for folder in store.folders() if (path := folder / CUTE_RUNTIME).exists()]
    return [*map(str, found), CUTE_RUNTIME]


@functools.cache
def load() -> Any:
    """Load what compiled kernels link to, once a process; returns the module `tvm_ffi`.

    Raises:
        MissingLibraryError: if one of the libraries is not installed.
    """
    try:
        tvm_ffi = importlib.import_module("tvm_ffi")
    except ImportError as error:
        raise MissingLibraryError(f"launching kernels needs apache-tvm-ffi ({error}): {INSTALL}") from error
    failures = []
    for path in _candidates():
        try:
            # kernels name the library without a folder and find it because it is loaded, which need not be globally
            ctypes.CDLL(path)
            return tvm_ffi
        except OSError as error:
            failures.append(str(error))
    raise MissingLibraryError(
        f"launching kernels needs {CUTE_RUNTIME}, which is not found ({'; '.join(failures)}): {INSTALL}, "
        f"or put the library into a folder of B12X_CACHE_DIR or LD_LIBRARY_PATH"
    )
