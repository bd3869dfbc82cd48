"""Tests of launching: threads, streams, graphs, devices, freezing."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from b12x_core.ops import _scratch
from b12x_core.ops.linear import LinearWeights, linear
from b12x_core.testing.cases import Case, WrongResultError, equal
from b12x_core.testing.linear import Layer, case

KERNEL = "launching"
HOST_RATIO = 2.0
"""Most host time of a whole op, quantization and all, in calls of `torch.mm`, which take an H200's host 11 to 17 us."""


def layer(name: str, n: int, k: int, device: torch.device) -> LinearWeights:
    """A layer of random weights."""
    return Layer(name, n, k, device).prepare()


def run_threads(device: torch.device) -> float:
    """Eight threads, each with a stream of its own, through one layer."""
    w = layer("fp8-channel", 640, 4096, device)
    xs = [torch.randn(m, 4096, device=device, dtype=torch.bfloat16) for m in (1, 2, 5, 8, 16, 40, 64, 130)]
    wanted = [linear(x, w) for x in xs]
    torch.cuda.synchronize(device)
    wrong: list[str] = []

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for _ in range(200):
                    y = linear(xs[index], w)
                torch.cuda.current_stream(device).synchronize()
            equal(y, wanted[index], f"thread {index}")
        except Exception as problem:
            wrong.append(f"{type(problem).__name__}: {problem}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise WrongResultError("; ".join(wrong))
    return 0.0


def run_graphs(device: torch.device) -> float:
    """Two graphs in one memory pool, replayed in turn and at the same time on two streams; M changes in between."""
    w = layer("fp8-block", 512, 8192, device)
    xs = [torch.randn(m, 8192, device=device, dtype=torch.bfloat16) for m in (1, 8)]
    wanted = [linear(x, w) for x in xs]
    pool = torch.cuda.graph_pool_handle()
    graphs, results = [], []
    for x in xs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results.append(linear(x, w))
        graphs.append(graph)
    linear(torch.randn(4096, 8192, device=device, dtype=torch.bfloat16), w)
    for round_ in range(20):
        for index, graph in enumerate(graphs):
            graph.replay()
            equal(results[index], wanted[index], f"graph {index} of one pool, round {round_}")
    apart = []
    for x in xs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x, w)
        apart.append((graph, y, torch.cuda.Stream(device)))
    torch.cuda.synchronize(device)
    for _ in range(200):
        for graph, _, stream in apart:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize(device)
    for index, (_, y, _) in enumerate(apart):
        equal(y, wanted[index], f"graph {index} replayed beside another")
    return 0.0


def run_million(device: torch.device) -> float:
    """A million launches of a kernel that splits its sums leave every counter at zero and the result the same."""
    w = layer("bf16", 64, 4096, device)
    x = torch.randn(1, 4096, device=device, dtype=torch.bfloat16)
    wanted = linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2000):
            y = linear(x, w)
    for _ in range(500):
        graph.replay()
    torch.cuda.synchronize(device)
    equal(y, wanted, "after a million launches")
    if not _scratch.counters_at_rest():
        raise WrongResultError("a counter is not zero after a million launches")
    return 0.0


_FIRST_USE = """
import torch
from b12x_core.errors import FrozenError
from b12x_core.testing.launching import layer
device = torch.device("cuda", torch.cuda.current_device())
w = layer("bf16", 64, 4096, device)
x = torch.randn(1, 4096, device=device, dtype=torch.bfloat16)
from b12x_core.ops.linear import linear
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear(x, w)
except FrozenError as error:
    assert "captured" in str(error), error
else:
    raise SystemExit("no error")
linear(x, w)
torch.cuda.synchronize()
print("raised, and served afterwards")
"""


def run_first_use_in_capture(device: torch.device) -> float:
    """In a new process, a kernel whose first use comes while a graph is recorded raises the named error."""
    with torch.cuda.device(device):
        done = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=False)
    if "raised, and served afterwards" not in done.stdout:
        raise WrongResultError(f"first use inside graph capture: {done.stdout}{done.stderr}")
    return 0.0


def run_host_time(device: torch.device) -> float:
    """Host time of a whole op called from Python, outside graphs, has a limit."""
    w = layer("fp8-channel", 512, 512, device)
    x = torch.randn(1, 512, device=device, dtype=torch.bfloat16)
    square = torch.randn(512, 512, device=device, dtype=torch.bfloat16)
    # how fast a process is depends on where the system put it, so both are measured in this one, in turns
    ours, theirs = [], []
    for _ in range(5):
        ours.append(host_us(partial(linear, x, w), device))
        theirs.append(host_us(partial(torch.mm, x, square), device))
    ratio = statistics.median(ours) / statistics.median(theirs)
    if ratio > HOST_RATIO:
        raise WrongResultError(
            f"a call took {statistics.median(ours):.1f} us of host time, {ratio:.2f} times as long as torch.mm; "
            f"the limit is {HOST_RATIO}"
        )
    return ratio / HOST_RATIO


def host_us(call: Callable[[], object], device: torch.device) -> float:
    """Median of the microseconds that the host takes for a call."""
    times = []
    for index in range(400):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        if index % 64 == 63:  # a full queue of launches would make the host wait
            torch.cuda.synchronize(device)
    return statistics.median(times) * 1e6


def run_many_graphs(device: torch.device) -> float:
    """However many calls are recorded, all find their counters zeroed before, and keep them."""
    w = layer("bf16", 640, 4096, device)
    x = torch.randn(3, 4096, device=device, dtype=torch.bfloat16)
    wanted = linear(x, w)
    graphs, results = [], []
    for _ in range(8):
        linear(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([linear(x, w) for _ in range(400)][-1])
        graphs.append(graph)
        if not _scratch.counters_left(device):
            raise WrongResultError("no counters are left for graphs although calls were made between them")
    filler = torch.full((1 << 26,), -1, dtype=torch.int32, device=device)  # what was given back is written over
    del filler
    for graph, result in zip(graphs, results, strict=True):
        graph.replay()
        equal(result, wanted, "one of many graphs")
    if not _scratch.counters_at_rest():
        raise WrongResultError("counters are not at rest after many graphs")
    return 0.0


def run_seen(device: torch.device) -> float:
    """Whoever looks on sees the op, and the result is that of a call that nobody sees."""
    names = []

    class Looking(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    w = layer("fp8-channel", 640, 4096, device)
    x = torch.randn(3, 4096, device=device, dtype=torch.bfloat16)
    unseen = linear(x, w)
    with Looking():
        equal(linear(x, w), unseen, "beside a dispatch mode")
    if names.count("b12x_core.linear_tiles.default") != 1:
        raise WrongResultError(f"a dispatch mode saw {names or 'nothing'} instead of the op")
    return 0.0


def run_other_device(device: torch.device) -> float:
    """A layer on another GPU than the current one."""
    if torch.cuda.device_count() < 2:
        return 0.0
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    w = layer("fp8-channel", 640, 4096, other)
    x = torch.randn(3, 4096, device=other, dtype=torch.bfloat16)
    with torch.cuda.device(other):
        wanted = linear(x, w)
    with torch.cuda.device(device):
        equal(linear(x, w), wanted, f"on {other} while {device} is current")
    return 0.0


def cases(device: torch.device) -> Iterator[Case]:
    """All of them."""
    for label, run, name, tokens, n, k in (
        ("host time", run_host_time, "fp8-channel", (1,), 512, 512),
        ("eight threads", run_threads, "fp8-channel", (1, 2, 5, 8, 16, 40, 64, 130), 640, 4096),
        ("graphs", run_graphs, "fp8-block", (1, 8, 4096), 512, 8192),
        ("first use in capture", run_first_use_in_capture, "bf16", (1,), 64, 4096),
        ("other device", run_other_device, "fp8-channel", (3,), 640, 4096),
        ("a million launches", run_million, "bf16", (1,), 64, 4096),
        ("many graphs", run_many_graphs, "bf16", (3,), 640, 4096),
        ("seen by modes", run_seen, "fp8-channel", (3,), 640, 4096),
    ):
        yield replace(case(name, tokens, n, k, device, label, partial(run, device)), kernel=KERNEL)
