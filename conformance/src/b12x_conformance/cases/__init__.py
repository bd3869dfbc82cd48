"""The cases of the conformance suite as data: what to build, what to feed it, what must come out.

`linear`, `moe` and `attention` each hold one tuple of problems. A problem is frozen, prints all of its parameters, and
builds the adapter's case, inputs and expectation when a test asks, so that collecting tests costs nothing. Ids that
start with `kind-` stand for the kinds of fault in `KINDS`; the others are a systematic grid.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch

KINDS: dict[int, str] = {
    1: "the output is all zero for some numbers of tokens",
    2: "the same GEMM gives different bits, or NaN, from time to time",
    3: "N padded from the wrong dimension",
    4: "tensor-parallel shards whose N or K is no multiple of 128",
    5: "padding of the scale layout",
    6: "float32 block scales rounded to powers of two",
    7: "an input scale that is 0 or denormal gives Inf or NaN",
    9: "a checkpoint with 4-bit activations served with 16-bit ones, or the reverse",
    10: "fused projections with different scales share one",
    11: "intermediate sizes such as 160, 928, 1856 refused or wrong",
    12: "expert parallelism takes global expert ids for local ones",
    13: "an expert id of -1 is not left out",
    14: "a batch without tokens",
    15: "the clamp before the activation is missing, or applied where there is none",
    22: "few tokens with many experts each, and a routed scaling factor",
    23: "int32 overflow in the offset of a page",
    24: "a block table that gets narrower or wider from step to step",
    25: "verification batches that keep the page ids of an earlier step",
    26: "padded rows of a batch give NaN or hang",
    27: "scales of FP8 keys and values ignored",
    28: "a sequence beyond the window, with FP8 keys and several query tokens",
    29: "the window off by one",
    30: "sinks ignored in prefill or for few keys",
    31: "prefills, chunks and decodes of very different lengths in one batch",
    32: "softmax scales other than head_dim ** -0.5, soft caps, values of another size than keys",
}
"""Kinds of fault that users of kernels like these reported and that plain torch can have, by the number in the ids."""


def generator(name: str) -> torch.Generator:
    """Random numbers that depend on the name of a problem only, not on the order or number of tests."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return torch.Generator().manual_seed(seed % 2**63)


def describe(problem: object) -> str:
    """Every parameter of a problem, one a line, for the message of a failed test."""
    assert dataclasses.is_dataclass(problem)
    lines = [type(problem).__name__]
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        lines.append(f"  {field.name} = {getattr(value, '__name__', None) or repr(value)}")
    return "\n".join(lines)
