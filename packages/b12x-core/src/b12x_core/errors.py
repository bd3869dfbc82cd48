"""The errors that this package raises on purpose.

All of them carry one sentence that names what was asked, what can be served instead and, where there is one,
the switch that changes the answer.
"""

from __future__ import annotations


class B12xError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedError(B12xError, NotImplementedError):
    """The request is well formed, but nothing here serves it on the device that was given."""


class ArgumentError(B12xError, ValueError):
    """An argument is malformed. The sentence says which one, what was expected and what came."""


class CompileError(B12xError, RuntimeError):
    """Kernels could not be compiled. The sentence names each with its configuration and what the compiler said."""


class FrozenError(B12xError, RuntimeError):
    """A kernel would have to be compiled or loaded where that is forbidden.

    The sentence names the kernel, the architecture and the command that builds it ahead of time.
    """


class MissingLibraryError(B12xError, ImportError):
    """A library that launching needs is not installed. The sentence says which, and what to install."""
