"""The kernel tests' own judgement, which needs no GPU: what is wrong must not pass."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from b12x_core.testing.bounds import bound
from b12x_core.testing.cases import Case, WrongResultError, equal, within


def test_equal_compares_bits() -> None:
    nan = torch.tensor([1.0, float("nan")])
    equal(nan, nan.clone(), "same")
    with pytest.raises(WrongResultError, match="zeros: 1 of 4 bytes differ, the first at"):
        equal(torch.tensor([0.0]), torch.tensor([-0.0]), "zeros")
    with pytest.raises(WrongResultError, match=r"shape: torch.float32 \(2,\) instead of torch.float32 \(1, 2\)"):
        equal(nan, nan.view(1, 2), "shape")


@pytest.mark.parametrize("wrong", [3.05, float("nan"), 0.0])
def test_within_refuses_errors_beyond_the_bound(wrong: float) -> None:
    truth = torch.randn(4, 64, dtype=torch.float64)
    truth[2, 3] = 3.0
    result = truth.bfloat16()
    limit = bound("linear", torch.bfloat16)
    assert 0 < within(result, truth, limit, "rounded") <= 1
    result[2, 3] = wrong
    with pytest.raises(WrongResultError, match=r"wrong: error .* is beyond"):
        within(result, truth, limit, "wrong")


def test_a_failing_case_fails_its_kernel_and_no_other() -> None:
    from b12x_core.testing.__main__ import run

    def fail() -> float:
        raise WrongResultError("it is wrong")

    results = run(iter([Case("a", "1", lambda: 0.5), Case("a", "2", fail), Case("b", "1", lambda: 0.25)]))
    assert results["a"].failures == ["2: WrongResultError: it is wrong"]
    assert results["a"].cases == 2
    assert results["a"].of_bound == 0.5
    assert "FAIL 1 of 2" in results["a"].line()
    assert not results["b"].failures
    assert "ok   1" in results["b"].line()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so the tests run instead")
def test_without_a_gpu_the_command_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "b12x_core.testing"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "no CUDA device is visible" in done.stderr
