"""Linear attention, the delta rule and the gated delta rule, one token at a time in float64."""

from __future__ import annotations

from itertools import pairwise

import torch


@torch.no_grad()
def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    normalize: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per value head, with a state S of K by V that starts at initial_state or 0::

        S <- exp(g_t) S                                   (with g [B, T, HV])
        S <- S + beta_t k_t (v_t - S^T k_t)^T             (with beta [B, T, HV])
        S <- S + k_t v_t^T                                (without)
        o_t = scale S^T q_t                               (normalize: divided by scale q_t . sum of k so far + 1e-10)

    q, k: [B, T, H, K]. v: [B, T, HV, V]; value head h reads key head h // (HV / H). cu_seqlens: [N + 1] offsets into T of
    packed sequences (B = 1). Returns o [B, T, HV, V] and the final states [N, HV, K, V] (or v-first), in float64.
    """
    batch, tokens, heads, width = q.shape
    value_heads, value_width = v.shape[2:]
    q, k, v = q.double(), k.double(), v.double()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (width**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(value_heads // heads, 2).flatten(0, 1) for x in (q, k))
    v = v.flatten(0, 1)
    alpha = None if g is None else g.double().exp().flatten(0, 1)
    strength = None if beta is None else beta.double().flatten(0, 1)
    bounds = [(n * tokens, (n + 1) * tokens) for n in range(batch)]
    if cu_seqlens is not None:
        bounds = list(pairwise(cu_seqlens.tolist()))
    o, states = torch.zeros_like(v), []
    for n, (start, end) in enumerate(bounds):
        s = v.new_zeros(value_heads, width, value_width)
        if initial_state is not None:
            given = initial_state[n].double()
            s = given.transpose(-1, -2).clone() if state_v_first else given.clone()
        keys = torch.zeros_like(s[..., 0])
        for t in range(start, end):
            if alpha is not None:
                s = s * alpha[t][:, None, None]
            u = v[t]
            if strength is not None:
                u = (u - torch.einsum("hkv,hk->hv", s, k[t])) * strength[t][:, None]
            s = s + k[t][:, :, None] * u[:, None, :]
            o[t] = torch.einsum("hkv,hk->hv", s, q[t])
            if normalize:
                keys = keys + k[t]
                o[t] /= ((q[t] * keys).sum(-1) + 1e-10)[:, None]
        states.append(s.transpose(-1, -2) if state_v_first else s)
    shape = (0, value_heads, *((value_width, width) if state_v_first else (width, value_width)))
    final = torch.stack(states) if states else v.new_zeros(shape)
    return o.view(batch, tokens, value_heads, value_width), final
