"""The blocks of packed sequences in the order in which they run, made on the device without waiting for it."""

from __future__ import annotations

import torch


def block_table(
    cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor, block: int, bound: int, causal: bool
) -> torch.Tensor:
    """[bound, 5] int32, a row a block of queries: its first row and the end of its sequence's rows, the sequence's first key
    and number of keys, and the last of these that the block's first query sees under a causal mask (negative for none).

    Blocks that see most keys come first, then rows of zeros: no query and no key. bound: at least the number of blocks;
    tokens // block + N always is.
    """
    queries, keys = cu_seqlens.diff(), cu_seqlens_k.diff()
    counts = (queries + (block - 1)) // block
    ends = counts.cumsum(0)
    number = torch.arange(bound, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, number, right=True)
    real = sequence < ends.shape[0]
    at = sequence.clamp(max=ends.shape[0] - 1)
    within = (number - (ends[at] - counts[at])) * block
    diagonal = within + keys[at] - queries[at]
    seen = torch.minimum(diagonal + block, keys[at]).clamp(min=0) if causal else keys[at]
    rows = torch.stack([cu_seqlens[at] + within, cu_seqlens[at + 1], cu_seqlens_k[at], keys[at], diagonal], 1)
    order = torch.where(real, seen, -1).argsort(descending=True, stable=True)
    return torch.where(real[:, None], rows, 0)[order].to(torch.int32)
