"""Plain torch stand-ins for the compiled helpers that vLLM's CPU engine calls by name in `torch.ops._C`.

Only what the engine reaches with unquantized or plug-in kernels, sampling, and n-gram speculation under greedy decoding
is here; anything else fails with torch's own message that names the missing op. A signature is part of vLLM's
interface; a body is written from what its caller in vLLM's Python code expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NAMESPACE = "_C"
_library: torch.library.Library | None = None


def _init_cpu_memory_env(node_ids: list[int]) -> None:
    """Bind allocations to memory nodes: without the extension, memory stays where the system puts it."""


def _compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Fill slot_mapping with the KV slot of every token, -1 beyond the last one.

    Args:
        query_start_loc: (R+1,) int32, first token of each request.
        positions: (T,) int64, position of each token in its sequence.
        block_table: (requests, blocks) int32.
        slot_mapping: (capacity,) int64, written.
        block_size: tokens a block.
    """
    lengths = torch.diff(query_start_loc.long())
    tokens = int(lengths.sum())
    request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    position = positions[:tokens].long()
    block = block_table[request, position // block_size].long()
    slot_mapping[:tokens] = block * block_size + position % block_size
    slot_mapping[tokens:] = -1


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest logit of each row: (B, V) -> (B,) int64."""
    return logits.argmax(dim=-1)


def _rejection_greedy_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
) -> None:
    """Verify proposed tokens against the target's likeliest ones, a request at a time.

    Tokens of the target are emitted up to and including the first that differs from the proposal; if none differs, the
    bonus token follows.

    Args:
        output_token_ids: (B, max_spec_len + 1) int64, written; untouched places keep the caller's placeholder.
        cu_num_draft_tokens: (B,) int64, running total of proposed tokens, this request's included.
        draft_token_ids, target_argmax: (total proposed,) int64.
        bonus_token_ids: (B, 1) int64.
        is_greedy: (B,) bool, None for all; other requests are left alone.
        max_spec_len: most tokens proposed for one request.
    """
    ends = cu_num_draft_tokens.tolist()
    bonus = bonus_token_ids.flatten().tolist()
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if is_greedy is not None and not bool(is_greedy[row]):
            continue
        proposed, wanted = draft_token_ids[start:end].tolist(), target_argmax[start:end].tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(proposed, wanted, strict=True)) if a != b), None)
        emitted = [*wanted, bonus[row]] if accepted is None else wanted[: accepted + 1]
        output_token_ids[row, : len(emitted)] = torch.tensor(emitted, dtype=output_token_ids.dtype)


def _fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """One sample of softmax(logits) a row, each row from its own seed.

    The largest of logit + Gumbel noise falls on an index with that index's probability; Gumbel noise is minus the
    logarithm of exponential noise.

    Args:
        logits: (B, V) float32, -inf for excluded tokens.
        seeds: (B,) int64.

    Returns:
        (B,) int64.
    """
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits - noise.log()).argmax(dim=-1)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "init_cpu_memory_env(int[] node_ids) -> ()": _init_cpu_memory_env,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, int block_size) -> ()": _compute_slot_mapping,
    "greedy_argmax(Tensor logits) -> Tensor": _greedy_argmax,
    "rejection_greedy_sample_kernel_impl(Tensor(a!) output_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor draft_token_ids, Tensor target_argmax, Tensor bonus_token_ids, Tensor? is_greedy, "
    "int max_spec_len) -> ()": _rejection_greedy_sample,
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": _fused_gumbel_argmax,
}


def define_missing() -> None:
    """Define the stand-ins that the loaded extensions lack. May be called again."""
    global _library
    if _library is None:
        # Kept alive for the life of the process: torch drops the definitions with the object.
        _library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for schema, body in _STAND_INS.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            _library.define(schema)
            _library.impl(name, body, "CPU" if "Tensor" in schema else "CompositeExplicitAutograd")
