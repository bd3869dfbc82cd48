"""vLLM without a GPU: the switch, and the plain torch stand-ins for vLLM's compiled helpers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from b12x_conformance import environment, vllm_cpu
from b12x_conformance.vllm_cpu import ops


@pytest.mark.parametrize(("value", "chosen"), [("1", True), ("0", False), ("", False)])
def test_platform_is_offered_only_when_asked_for(value: str, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CPU.name, value)
    assert (vllm_cpu.activate() is not None) == chosen


def test_asking_imports_nothing_of_vllm() -> None:
    code = "import sys; from b12x_conformance import vllm_cpu; vllm_cpu.activate(); print('vllm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_slots_follow_the_block_table_and_padding_is_marked() -> None:
    slots = torch.full((6,), 99)
    starts, positions = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([15, 16, 17, 0])
    table = torch.tensor([[4, 2], [7, 0]], dtype=torch.int32)
    ops._compute_slot_mapping(starts, positions, table, slots, 16)
    assert slots.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 7 * 16, -1, -1]


def test_verification_emits_up_to_the_first_difference() -> None:
    output = torch.full((4, 3), -1)
    ops._rejection_greedy_sample(
        output,
        torch.tensor([2, 4, 4, 6]),
        torch.tensor([5, 6, 5, 6, 5, 6]),
        torch.tensor([5, 6, 5, 9, 5, 6]),
        torch.tensor([[1], [2], [3], [4]]),
        torch.tensor([True, True, True, False]),
        2,
    )
    # All accepted and the bonus; one accepted and its correction; nothing proposed; not a greedy request.
    assert output.tolist() == [[5, 6, 1], [5, 9, -1], [3, -1, -1], [-1, -1, -1]]


def test_samples_follow_the_distribution_and_their_seed() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0]).expand(20_000, 4)
    seeds = torch.arange(20_000)
    tokens = ops._fused_gumbel_argmax(logits, seeds)
    assert torch.equal(tokens, ops._fused_gumbel_argmax(logits, seeds))
    found = torch.bincount(tokens, minlength=4) / tokens.numel()
    # Five standard deviations of a frequency over this many samples.
    torch.testing.assert_close(found, logits[0].softmax(-1), rtol=0, atol=5 * 0.5 / 20_000**0.5)
