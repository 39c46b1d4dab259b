"""Expanded MLA in plain torch operations, for autograd to differentiate: right, slow, and it stores the scores."""

from __future__ import annotations

import math

import torch


def visible(
    T: int,
    S: int,
    causal: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """[T, S] bool: which keys a query sees. Reads the lengths on the device only."""
    rows, columns = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)[None, :]
    if cu_seqlens is None:
        seen = torch.ones(T, S, dtype=torch.bool, device=device)
        return seen & (columns <= rows + (S - T)) if causal else seen
    cu_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    of_row = torch.searchsorted(cu_seqlens[1:].contiguous(), rows[:, 0].contiguous(), right=True)[:, None]
    of_column = torch.searchsorted(cu_k[1:].contiguous(), columns[0].contiguous(), right=True)[None, :]
    seen = of_row == of_column
    if causal:  # aligned at the ends of both sequences
        last = cu_seqlens.shape[0] - 2
        end = of_row.clamp(max=last) + 1
        seen = seen & (columns - cu_k[end] <= rows - cu_seqlens[end])
    return seen


def prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, T, H, V] and lse [B, H, T] in fp32 without the roundings in between."""
    T, S, K = q.shape[1], k_nope.shape[1], q.shape[3]
    D = k_nope.shape[-1]
    q = q.float() * (K**-0.5 if scale is None else scale)
    scores = torch.einsum("bthd,bshd->bhts", q[..., :D], k_nope.float())
    scores = scores + torch.einsum("bthe,bse->bhts", q[..., D:], k_pe.float())
    seen = visible(T, S, causal, cu_seqlens, cu_seqlens_k, q.device)
    some = seen.any(-1)
    # a row without keys takes finite scores, so that no infinity meets another in the gradient, and is cleared afterwards
    scores = torch.where(seen, scores, torch.where(some, -math.inf, 0.0)[:, None])
    weights = torch.where(some[:, None], torch.softmax(scores, -1), 0.0)
    lse = torch.where(some, torch.logsumexp(scores, -1), -math.inf)
    o = torch.einsum("bhts,bshv->bthv", weights, v.float())
    return (o if gate is None else o * torch.sigmoid(gate.float())), lse
