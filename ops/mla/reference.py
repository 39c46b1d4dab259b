"""What the MLA ops compute, in float64 and plain torch, one sequence or request after the other."""

from __future__ import annotations

import math

import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one sequence: q [T, H, K], k [S, H, K], v [S, H, V] in float64 -> o [T, H, V], lse [H, T].

    With causal, query i sees keys up to i + S - T. A query that sees none has o = 0 and lse = -inf.
    """
    weights, lse = _softmax(torch.einsum("thk,shk->hts", q, k) * scale, causal)
    return torch.einsum("hts,shv->thv", weights, v), lse


def _softmax(scores: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [H, T, S] and the natural log-sum-exp [H, T] of scores [H, T, S]."""
    T, S = scores.shape[1:]
    if causal:
        newest = torch.arange(T, device=scores.device)[:, None] + (S - T)
        hidden = torch.arange(S, device=scores.device)[None, :] > newest
        scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(scores - lse[..., None])), lse


def prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    gate: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, T, H, V] and the natural log-sum-exp [B, H, T] of expanded MLA, as `k3dsl.ops.mla_prefill` states it."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    scale = K**-0.5 if scale is None else scale
    k = torch.cat([k_nope.double(), k_pe.double()[:, :, None, :].expand(-1, -1, H, -1)], -1)
    o = torch.zeros(B, T, H, V, dtype=torch.float64, device=q.device)
    lse = torch.full((B, H, T), -math.inf, dtype=torch.float64, device=q.device)
    if cu_seqlens is None:
        parts = [(b, slice(None), slice(None)) for b in range(B)]
    else:
        ends_q = cu_seqlens.tolist()
        ends_k = ends_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
        parts = [(0, slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])) for n in range(len(ends_q) - 1)]
    for b, rows, keys in parts:
        out = attend(q[b, rows].double(), k[b, keys], v[b, keys].double(), scale, causal)
        o[b, rows], lse[b, :, rows] = out
    return (o if gate is None else o * torch.sigmoid(gate.double())), lse


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lora_rank: int = 512,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, T, H, C] and the natural log-sum-exp [B, H, T] of absorbed MLA, as `k3dsl.ops.mla_decode` states it."""
    (B, T, H, _), page, C = q.shape, kv_cache.shape[1], kv_lora_rank
    scale = 192**-0.5 if scale is None else scale
    o = torch.zeros(B, T, H, C, dtype=torch.float64, device=q.device)
    lse = torch.full((B, H, T), -math.inf, dtype=torch.float64, device=q.device)
    for b, length in enumerate(cache_seqlens.tolist()):
        pages = page_table[b, : -(-length // page)].long()
        rows = kv_cache[pages].reshape(-1, kv_cache.shape[-1])[:length].double()
        scores = torch.einsum("thk,sk->hts", q[b].double(), rows) * scale  # all heads share the keys
        weights, lse[b] = _softmax(scores, causal)
        o[b] = torch.einsum("hts,sc->thc", weights, rows[:, :C])
    return o, lse


def cache_write(
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """A float64 copy of the cache [pages, page, C+E] with every token of a slot of at least 0 written."""
    rows = latent.double()
    if norm_weight is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * norm_weight.double()
    rows = torch.cat([rows, k_pe.double()], -1)
    cache = kv_cache.double().flatten(0, 1)
    live = slot_mapping >= 0
    cache[slot_mapping[live].long()] = rows[live]
    return cache.view(kv_cache.shape)
