"""Which op served how many layers with how many calls: counted where the op runs, never inferred.

A key is "<op>/<scheme>" ("linear/nvfp4-w4a4"). A layer is a distinct weight (linear, MoE) or KV cache (attention)
that was seen. Calls replayed from a CUDA graph do not pass through Python and are counted once, at capture.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch

from b12x_core import environment

FLUSH_SECONDS = 0.5


class Count(TypedDict):
    """Calls of an op in one scheme, and the distinct layers that made them."""

    calls: int
    layers: int


@dataclass
class _Entry:
    calls: int = 0
    layers: set[int] = field(default_factory=set)


_entries: dict[tuple[str, str], _Entry] = {}
_lock = threading.Lock()
_writer: threading.Thread | None = None


def record(op: str, scheme: str, layer: torch.Tensor) -> None:
    """Count one call of `op` in `scheme` by the layer that owns the tensor `layer`."""
    address = layer.data_ptr()
    with _lock:
        entry = _entries.get((op, scheme))
        if entry is None:
            entry = _entries[op, scheme] = _Entry()
        entry.calls += 1
        known = address in entry.layers
        if not known:
            entry.layers.add(address)
    # Looking at the environment takes as long as the rest: a layer that was seen changes nothing about it.
    if not known and _writer is None and environment.STATS.get():
        _start_writer()


def snapshot() -> dict[str, Count]:
    """The counts of this process by key."""
    with _lock:
        return {
            f"{op}/{scheme}": Count(calls=entry.calls, layers=len(entry.layers))
            for (op, scheme), entry in sorted(_entries.items())
        }


def reset() -> None:
    """Forget what was counted in this process."""
    with _lock:
        _entries.clear()


def collect(folder: str | Path) -> dict[str, Count]:
    """The sum over the files that processes with `B12X_STATS=folder` wrote."""
    total: dict[str, Count] = {}
    for path in sorted(Path(folder).glob("*.json")):
        for key, count in json.loads(path.read_text()).items():
            so_far = total.setdefault(key, Count(calls=0, layers=0))
            so_far["calls"] += count["calls"]
            so_far["layers"] += count["layers"]
    return dict(sorted(total.items()))


def _write(folder: str) -> None:
    path = Path(folder) / f"{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(snapshot()))
    partial.replace(path)


def _start_writer() -> None:
    """Write from a thread: engines end their worker processes with signals, which skip handlers at exit."""
    global _writer
    folder = environment.STATS.get()
    stop = threading.Event()

    def run() -> None:
        written: dict[str, Count] | None = None
        while True:
            ended = stop.wait(FLUSH_SECONDS)
            if snapshot() != written:
                _write(folder)
                written = snapshot()
            if ended:
                return

    with _lock:
        if _writer is not None:
            return
        _writer = threading.Thread(target=run, name="b12x-stats", daemon=True)
        _writer.start()
    atexit.register(stop.set)
