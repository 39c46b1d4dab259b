"""What matmul computes, in float64."""

from __future__ import annotations

import torch


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] times b [K, N], in float64."""
    return a.double() @ b.double()
