"""What rmsnorm computes, in float64."""

from __future__ import annotations

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., D] * rsqrt(mean(x^2) + eps) * weight [D], in float64 without the rounding in between."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
