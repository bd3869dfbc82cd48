"""What can go wrong when a kernel is made to run on a GPU that it was not compiled for."""

from __future__ import annotations


class EmulationError(Exception):
    """Base of the errors of this package."""


class ToolMissingError(EmulationError):
    """A program of the CUDA toolkit, or the C compiler, is not installed. Names it and says where it was looked for."""


class ToolError(EmulationError):
    """A program refused its input for a reason other than an unknown instruction. Carries what it printed."""


class UnknownInstructionError(EmulationError):
    """The PTX has instructions that the target lacks and that nothing stands in for. Names each, with its line."""
