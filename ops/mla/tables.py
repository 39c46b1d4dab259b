"""The order in which blocks of packed sequences run, made on the device without waiting for it."""

from __future__ import annotations

import torch


def block_table(
    cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor, block: int, bound: int, causal: bool
) -> torch.Tensor:
    """[bound, 2] int32: (sequence, block of queries within it), those that see most keys first, then rows of (-1, 0).

    bound: at least the number of blocks; tokens // block + N always is.
    """
    queries, keys = cu_seqlens.diff(), cu_seqlens_k.diff()
    ends = ((queries + (block - 1)) // block).cumsum(0)
    number = torch.arange(bound, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, number, right=True)
    real = sequence < ends.shape[0]
    at = sequence.clamp(max=ends.shape[0] - 1)
    within = number - (ends[at] - (queries[at] + (block - 1)) // block)
    seen = keys[at]
    if causal:
        seen = torch.minimum(seen, (within + 1) * block + seen - queries[at]).clamp(min=0)
    order = torch.where(real, seen, -1).argsort(descending=True, stable=True)
    rows = torch.stack([torch.where(real, sequence, -1), torch.where(real, within, 0)], 1)
    return rows[order].to(torch.int32)
