"""Memory of a call that its caller never sees: quantized activations, parts of sums, counters of blocks that arrive.

Calls on one stream follow each other, so those of a thread on a stream share one piece of memory, cut up once for each
kind of call: allocating and converting four tensors would take the host longer than launching. Calls that need more
than `SHARED_BYTES` allocate, and so do those that are recorded into a CUDA graph, whose memory must stay its own: two
graphs recorded on one stream may be replayed at the same time on two.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from b12x_core import runtime
from b12x_core.runtime.devices import device_index

COUNTERS = 1024
"""Counters a launch may use. They are zero when a kernel starts, and it leaves them at zero."""

SHARED_BYTES = 32 << 20
"""Most bytes that calls share: larger ones take so long that allocating is hidden."""

_ALIGNMENT = 256
_KINDS = 1024  # of calls, whose pieces are remembered
_RESERVED = 1024  # calls in graphs that find their counters zeroed
_lock = threading.Lock()
_reserve: dict[int, tuple[torch.Tensor, int]] = {}
_kept: list[torch.Tensor] = []  # reserves that recorded graphs point into
_low: set[int] = set()  # devices whose reserve is half gone
_local = threading.local()


@dataclass(frozen=True)
class Piece:
    """A tensor of scratch: its shape, (), for none; and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, up to the alignment of the next."""
        size = self.dtype.itemsize
        for count in self.shape:
            size *= count
        return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False)
class Pieces:
    """The tensors of scratch of a kind of call. Compared by identity, which costs the host least."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(piece.nbytes for piece in self.pieces)

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        """Tensors of their own."""
        return [torch.empty(piece.shape, dtype=piece.dtype, device=device) for piece in self.pieces]


@dataclass
class _Stream:
    """What calls of a thread on a stream share."""

    counters: torch.Tensor
    buffer: torch.Tensor | None = None
    cut: OrderedDict[Pieces, tuple[Any, ...]] = field(default_factory=OrderedDict)


def take(pieces: Pieces, device: torch.device) -> tuple[Any, ...]:
    """Tensors for a call on the current stream: the counters, then one for each piece, as launches take them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return (_recorded_counters(index, device), *pieces.allocate(device))
    if index in _low:
        _fill_reserve(index, device)
    streams: dict[tuple[int, int], _Stream] | None = getattr(_local, "streams", None)
    if streams is None:
        streams = _local.streams = {}
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    stream = streams.get(key)
    if stream is None:
        stream = streams[key] = _Stream(torch.zeros(COUNTERS, dtype=torch.int32, device=device))
        _fill_reserve(index, device)
    found = stream.cut.get(pieces)
    return _cut(pieces, stream, device) if found is None else found


def _cut(pieces: Pieces, stream: _Stream, device: torch.device) -> tuple[Any, ...]:
    """Cut the shared memory up for a kind of call."""
    need = pieces.nbytes
    if need > SHARED_BYTES:
        return (stream.counters, *pieces.allocate(device))
    if stream.buffer is None or stream.buffer.numel() < need:
        stream.cut.clear()
        stream.buffer = torch.empty(max(need, 1 << 20), dtype=torch.uint8, device=device)
    tensors, offset = [stream.counters], 0
    for piece in pieces.pieces:
        count = piece.dtype.itemsize
        for size in piece.shape:
            count *= size
        tensors.append(stream.buffer[offset : offset + count].view(piece.dtype).view(piece.shape))
        offset += piece.nbytes
    if len(stream.cut) >= _KINDS:
        stream.cut.popitem(last=False)
    found = stream.cut[pieces] = tuple(runtime.argument(tensor) for tensor in tensors)
    return found


def _fill_reserve(index: int, device: torch.device) -> None:
    """Counters for graphs, zeroed before any is recorded. Who records graphs runs each shape once before."""
    with _lock:
        if index not in _reserve or index in _low:
            fresh = torch.zeros((_RESERVED, COUNTERS), dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # other streams may use it at once
            _reserve[index] = (fresh, 0)
            _kept.append(fresh)
            _low.discard(index)


def _recorded_counters(index: int, device: torch.device) -> torch.Tensor:
    with _lock:
        chunk, used = _reserve.get(index, (None, _RESERVED))
        if chunk is None or used == _RESERVED:
            # Zeroed by a node of the graph at each replay: right, only slower.
            return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _reserve[index] = (chunk, used + 1)
        if used + 1 >= _RESERVED // 2:
            _low.add(index)
        return chunk[used]


def counters_left(device: torch.device) -> int:
    """How many calls that are recorded into graphs now would find their counters zeroed."""
    index = device_index(device)
    return _RESERVED - _reserve[index][1] if index in _reserve else 0


def counters_at_rest() -> bool:
    """Whether all counters that this thread can see are zero; waits for the GPU."""
    streams: dict[tuple[int, int], _Stream] = getattr(_local, "streams", {})
    held = [stream.counters for stream in streams.values()] + _kept
    return not any(bool(counters.any()) for counters in held)
