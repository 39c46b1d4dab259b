"""What gated_rmsnorm computes, in float64."""

from __future__ import annotations

import torch


def gated_rmsnorm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, activation: str = "sigmoid"
) -> torch.Tensor:
    """x [..., D] * rsqrt(mean(x^2) + eps) * weight [D] * sigmoid(gate) (times the gate, for "silu"), in float64."""
    x, gate = x.double(), gate.double()
    opened = torch.sigmoid(gate) * (gate if activation == "silu" else 1.0)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double() * opened
