"""Stand-in for SGLang's compiled package on a machine without a GPU: what the CPU engine needs to run, in plain torch.

Everything else that SGLang imports by name is there and raises when it is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots, which follow one another in out_cache_loc, into its row of req_to_token."""
    del pool_len
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse of `assign_req_to_token_pool_cpu`: read each request's slots from its row, one after another."""
    del pool_len
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        taken += end - start


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Gather the slots of accepted tokens; -1 marks none."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move rows of caches that are given by their addresses and by the bytes of a row."""
    for start, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(start + slot * size, size) for slot in src_loc.tolist()]
        for slot, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(start + slot * size, row, size)


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each request's tree of proposals from its root, as long as a child is what the model would have said."""
    wanted = target_predict.flatten().tolist()
    for row, nodes in enumerate(retrive_index.tolist()):
        node, accepted = 0, 0
        accept_index[row, 0] = nodes[0]
        while True:
            predicts[nodes[node]] = wanted[nodes[node]]
            child = int(retrive_next_token[row, node])
            while child >= 0 and int(candidates[row, child]) != wanted[nodes[node]]:
                child = int(retrive_next_sibling[row, child])
            if child < 0 or accepted + 1 == accept_index.shape[1]:
                break
            node, accepted = child, accepted + 1
            accept_index[row, accepted] = nodes[node]
        accept_token_num[row] = accepted


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a machine without a GPU")

    return missing
