"""Counting of calls, in the process and across processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from b12x_core import Scheme, counters, linear, prepare_linear

BF16 = Scheme.parse("bf16")


@pytest.fixture(autouse=True)
def reset() -> None:
    counters.reset()


def test_calls_and_layers_are_counted() -> None:
    layers = [prepare_linear(BF16, torch.zeros(4, 8, dtype=torch.bfloat16)) for _ in range(3)]
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    for layer in (*layers, layers[0]):
        linear(x, layer)
    assert counters.snapshot() == {"linear/bf16": {"calls": 4, "layers": 3}}


CHILD = """
import os, signal, time, torch
from b12x_core import Scheme, linear, prepare_linear
w = prepare_linear(Scheme.parse("bf16"), torch.zeros(4, 8, dtype=torch.bfloat16))
for _ in range(5):
    linear(torch.zeros(2, 8, dtype=torch.bfloat16), w)
print("ran", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_STATS", str(tmp_path))
    children = [subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ran\n"
            deadline = 200
            while not (tmp_path / f"{child.pid}.json").exists() and deadline:
                deadline -= 1
                subprocess.run(["sleep", "0.05"], check=True)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert counters.collect(tmp_path) == {"linear/bf16": {"calls": 10, "layers": 2}}
