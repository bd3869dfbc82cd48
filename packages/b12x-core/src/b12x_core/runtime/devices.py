"""Facts about devices that planning and compiling need, read once a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from b12x_core.errors import UnsupportedError

ARCHITECTURES = {(9, 0): "sm_90a", (12, 0): "sm_120a", (12, 1): "sm_121a"}
"""Compute capability -> the exact architecture that kernels are compiled for."""


@dataclass(frozen=True)
class DeviceFacts:
    """A CUDA device.

    Attributes:
        arch: the architecture that kernels for it are compiled for, "sm_120a".
        multiprocessors: how many it has.
        shared_memory: most shared memory of a block, bytes.
        multiprocessor_shared_memory: what the blocks on a multiprocessor share, bytes, 1024 of it a block for the
            system.
    """

    arch: str
    multiprocessors: int
    shared_memory: int
    multiprocessor_shared_memory: int = 102_400


_facts: dict[int, DeviceFacts] = {}
_fake: DeviceFacts | None = None


def device_index(device: torch.device | str | int | None = None) -> int:
    """The index of a CUDA device; of the current one for None and for "cuda"."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    if index is not None:
        return index
    return 0 if _fake is not None else torch.cuda.current_device()


def facts(device: torch.device | str | int | None = None) -> DeviceFacts:
    """The facts of a CUDA device, by default the current one.

    Raises:
        UnsupportedError: if no kernel is compiled for its compute capability.
    """
    if _fake is not None:
        return _fake
    index = device_index(device)
    known = _facts.get(index)
    if known is None:
        properties: Any = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if capability not in ARCHITECTURES:
            served = ", ".join(f"{major}.{minor} ({arch})" for (major, minor), arch in ARCHITECTURES.items())
            raise UnsupportedError(
                f"cuda:{index} ({properties.name}) has compute capability {capability[0]}.{capability[1]}; "
                f"kernels exist for {served} (B12X_REFERENCE=1 runs plain torch on any device)"
            )
        known = _facts[index] = DeviceFacts(
            ARCHITECTURES[capability],
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,
            properties.shared_memory_per_multiprocessor,
        )
    return known


@contextlib.contextmanager
def fake(device: DeviceFacts) -> Iterator[None]:
    """Within this context every device has these facts: for tests, and for planning for a machine that is not here."""
    global _fake
    before, _fake = _fake, device
    try:
        yield
    finally:
        _fake = before
