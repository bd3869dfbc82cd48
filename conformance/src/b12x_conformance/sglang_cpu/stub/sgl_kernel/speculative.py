"""Stand-ins for the part of the compiled package that SGLang's n-gram speculation imports."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees of proposals that are given as (batch_size, n, n): does node i descend from j?"""
    count = draft_token_num
    trees = tree_mask.view(batch_size, count, count).tolist()
    for row, tree in enumerate(trees):
        ancestors = [[j for j in range(i) if tree[i][j]] for i in range(count)]
        parents = [above[-1] if above else -1 for above in ancestors]
        for i in range(count):
            positions[row * count + i] = int(verified_seq_len[row]) + len(ancestors[i])
            retrieve_index[row, i] = row * count + i
            retrieve_next_token[row, i] = next((k for k in range(i + 1, count) if parents[k] == i), -1)
            siblings = (k for k in range(i + 1, count) if parents[k] == parents[i] >= 0)
            retrieve_next_sibling[row, i] = next(siblings, -1)
