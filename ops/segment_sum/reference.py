"""What segment_sum computes, in float64."""

from __future__ import annotations

import torch


def segment_sum(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """values [T, D] and offsets [N+1] -> [N, D], in float64."""
    return torch.stack([part.double().sum(0) for part in values.tensor_split(cu_seqlens[1:-1].long().cpu())])
