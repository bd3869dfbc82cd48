"""Kernels of the runtime's tests, laid out as those of the package."""
