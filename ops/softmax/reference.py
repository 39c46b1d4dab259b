"""What softmax computes, in float64."""

from __future__ import annotations

import torch


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dim, in float64."""
    return torch.softmax(x.double(), -1)
