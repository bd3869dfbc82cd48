"""Tests of the kernels on a GPU, from kernels that are built already: `python -m b12x_core.testing`.

They need torch and what launches a kernel, no network, no compiler and no test framework, so that they run on the
machine that serves. The bounds that decide are those of the conformance suite.
"""
