"""What AttnRes computes, in float64."""

from __future__ import annotations

import torch


def scores(rows: torch.Tensor, queries: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Logits [S, T, N] of rows [N, T, D] for queries [S, D] that have the key norm folded in, in float64."""
    r = rows.double()
    keys = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps)
    return torch.einsum("ntd,sd->stn", keys, queries.double())


def attnres(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h = sum_j softmax_j(l)_j r_j over the bank's rows [N, T, D] and the prefix [T, D], and RMSNorm(h) or None, in float64.

    l_j = sum_d w_d gamma_d r_jd rsqrt(mean r_j^2 + eps), with query w [D] and key norm gamma [D]. Nothing is rounded on the
    way. Source: Attention Residuals (arXiv 2603.15031), block form.
    """
    rows = torch.cat([bank.double(), prefix.double()[None]])
    w = query.double() if key_norm is None else query.double() * key_norm.double()
    weights = torch.softmax(scores(rows, w[None], eps)[0], -1)
    h = torch.einsum("tn,ntd->td", weights, rows)
    if norm_weight is None:
        return h, None
    return h, h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.double()


def phase1(
    bank: torch.Tensor, queries: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest logit [S, T], denominator [S, T] and unnormalised mix [S, T, D] over the bank alone, in float64."""
    logits = scores(bank, queries, eps)
    top = logits.amax(-1)
    shares = (logits - top[..., None]).exp()
    return top, shares.sum(-1), torch.einsum("stn,ntd->std", shares, bank.double())
