"""SGLang without a GPU: the switch, and the plain torch stand-ins for its compiled package."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from b12x_conformance import environment, sglang_cpu

ASK = """
import sys, b12x_conformance.sglang_cpu as cpu
cpu.activate()
print(str(cpu.STUB) in sys.path, "sglang.srt" in sys.modules)
"""


@pytest.mark.parametrize("value", ["0", ""])
def test_nothing_changes_unless_asked_for(value: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {environment.CPU.name: value, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["False", "False"]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in package, whether or not SGLang is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(sglang_cpu.STUB))
    return importlib.import_module("sgl_kernel")


def test_slots_are_written_and_read_back(stub: ModuleType) -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([4, 2])
    slots = torch.tensor([11, 12, 13, 21, 22])
    stub.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, 8)
    assert table.tolist() == [[21, 22, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 11, 12, 13, 0, 0, 0, 0]]
    read = torch.zeros(5, dtype=torch.int64)
    stub.assign_extend_cache_locs_cpu(rows, table, starts, ends, read, 8)
    assert torch.equal(read, slots)


def test_what_has_no_stand_in_says_so_when_it_is_called(stub: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="silu_and_mul"):
        stub.silu_and_mul(None)


#        0        the root, which is sure
#      1   3      two proposals for what follows
#      2          and one for what follows the first
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [([5, 6, 8, 9], [0, 1, 2]), ([7, 0, 0, 4], [0, 3]), ([9, 0, 0, 0], [0])],
    ids=["the first branch to its end", "a sibling", "none"],
)
def test_verification_walks_the_tree(stub: ModuleType, wanted: list[int], accepted: list[int]) -> None:
    links = {name: torch.zeros(1, 4, dtype=torch.int64) for name in ("index", "token", "sibling")}
    positions = torch.zeros(4, dtype=torch.int64)
    speculative = importlib.import_module("sgl_kernel.speculative")
    speculative.reconstruct_indices_from_tree_mask(
        TREE.flatten(), torch.tensor([10]), positions, links["index"], links["token"], links["sibling"], 1, 4
    )
    assert positions.tolist() == [10, 11, 12, 11]
    assert links["token"].tolist() == [[1, 2, -1, -1]]
    assert links["sibling"].tolist() == [[-1, 3, -1, -1]]
    predicts, index = torch.zeros(4, dtype=torch.int32), torch.full((1, 4), -1, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    stub.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=index,
        accept_token_num=count,
        candidates=torch.tensor([[4, 5, 6, 7]]),
        retrive_index=links["index"],
        retrive_next_token=links["token"],
        retrive_next_sibling=links["sibling"],
        target_predict=torch.tensor([wanted]),
    )
    assert index[0, : len(accepted)].tolist() == accepted
    assert count.tolist() == [len(accepted) - 1]
    assert [predicts[node].item() for node in accepted] == [wanted[node] for node in accepted]


def test_slots_of_accepted_proposals_are_gathered(stub: ModuleType) -> None:
    slots, kept = torch.tensor([10, 11, 12, 13]), torch.zeros(4, dtype=torch.int64)
    stub.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 3], [2, -1]]), slots, kept)
    assert kept.tolist() == [10, 13, 12, 0]


def test_rows_are_moved_even_where_they_overlap(stub: ModuleType) -> None:
    caches = [torch.arange(8.0).view(4, 2), torch.arange(12, dtype=torch.uint8).view(4, 3)]
    addresses = torch.tensor([cache.data_ptr() for cache in caches])
    strides = torch.tensor([cache.stride(0) * cache.itemsize for cache in caches])
    stub.copy_all_layer_kv_cache_cpu(addresses, strides, torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert caches[0].tolist() == [[0, 1], [4, 5], [6, 7], [6, 7]]
    assert caches[1].tolist() == [[0, 1, 2], [6, 7, 8], [9, 10, 11], [9, 10, 11]]
