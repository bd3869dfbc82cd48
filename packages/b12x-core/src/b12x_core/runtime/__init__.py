"""Compiling, storing, loading and launching of kernels.

`get` gives the function that launches a kernel. Kernels are compiled in processes of their own, by the only module
here that imports the compiler, kept in the folders of `B12X_CACHE_DIR`, and loaded without the compiler.
"""

from b12x_core.runtime.compiling import Compiled, compile_all
from b12x_core.runtime.devices import DeviceFacts, facts
from b12x_core.runtime.loader import Counts, Launch, argument, command, counts, freeze, frozen, get, unfreeze, warm

__all__ = [
    "Compiled",
    "Counts",
    "DeviceFacts",
    "Launch",
    "argument",
    "command",
    "compile_all",
    "counts",
    "facts",
    "freeze",
    "frozen",
    "get",
    "unfreeze",
    "warm",
]
