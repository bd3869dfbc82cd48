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
