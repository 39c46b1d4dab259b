"""What attention computes, in float64."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v and the natural log of the softmax's denominator, in float64.

    q [B, T, H, D], k [B, S, HK, D], v [B, S, HK, V]; query head h reads key head h // (H / HK). With causal, query i sees
    keys up to i + S - T. Returns o [B, T, H, V] and lse [B, H, T].
    """
    T, H, D = q.shape[1:]
    S, repeats = k.shape[1], H // k.shape[2]
    k, v = (x.double().repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) * (D**-0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhts,bshv->bthv", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` of each request with the first cache_seqlens[b] slots of its cache, in float64; a query without a key has
    output 0 and log-sum-exp -inf. q [B, T, H, D], caches [B, S, HK, D or V]. Returns o [B, T, H, V] and lse [B, H, T]."""
    B, T, H = q.shape[:3]
    o = torch.zeros(B, T, H, v_cache.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((B, H, T), float("-inf"), dtype=torch.float64, device=q.device)
    for b, n in enumerate(cache_seqlens.tolist()):
        seeing = min(T, n)
        if seeing > 0:
            last = slice(T - seeing, T)
            found = attention(q[b : b + 1, last], k_cache[b : b + 1, :n], v_cache[b : b + 1, :n], scale=scale)
            o[b, last], lse[b, :, last] = found[0][0], found[1][0]
    return o, lse
