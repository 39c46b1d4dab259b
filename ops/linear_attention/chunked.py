"""The three in their chunk form in plain differentiable torch: right and slow, it gives the gradients of the functions."""

from __future__ import annotations

import torch

from k3dsl.ops.kda.chunked import chunked as kda_chunked

NORMALIZE_EPS = 1e-10


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    normalize: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `k3dsl.ops.linear_attention.reference.recurrence` computes, in fp32 (fp64 for fp64 inputs), with autograd.

    Arguments and shapes as there; rows that belong to no sequence are 0, and without output_final_state the state is None.
    In the backward pass each chunk is computed again. Reads cu_seqlens on the host.
    """
    width = v.shape[-1]
    if normalize:  # one more value, 1 for every token, has the sum of the scores as its output
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        if initial_state is not None:
            row = initial_state[..., :1, :] if state_v_first else initial_state[..., :1]
            initial_state = torch.cat([initial_state, torch.zeros_like(row)], -2 if state_v_first else -1)
    nothing = v.new_zeros(1).expand(v.shape[:-1])
    o, state = kda_chunked(
        q,
        k,
        v,
        nothing if g is None else g,
        nothing if beta is None else beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        step=_linear_step if beta is None else _delta_step,
    )
    if normalize:
        o = o[..., :width] / (o[..., width:] + NORMALIZE_EPS)
        if state is not None:
            state = state[..., :width, :] if state_v_first else state[..., :width]
    return o, state


def _delta_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of C tokens: (o [n, HV, C, V], next state) from the state [n, HV, K, V].

    q, k: [n, H, C, K], q scaled. v: [n, HV, C, V]. g, beta: [n, HV, C].
    """
    group = g.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    size = g.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    # between[i, j] = g_{j+1} + ... + g_i for j < i, summed directly; entries j >= i sum nothing and stay 0
    between = torch.where(later, g.unsqueeze(-1), 0.0).cumsum(-2)
    decay = torch.where(later, between.exp(), 0.0)
    a = beta.unsqueeze(-1) * decay * (k @ k.transpose(-1, -2))
    p = decay * (q @ k.transpose(-1, -2)) + torch.diag_embed((q * k).sum(-1))
    since = g.cumsum(-1).exp().unsqueeze(-1)
    residual = beta.unsqueeze(-1) * (v - (k * since) @ state)
    u = torch.linalg.solve_triangular(a, residual, upper=False, unitriangular=True)
    o = (q * since) @ state + p @ u
    until = between[..., -1, :].exp().unsqueeze(-1)
    return o, since[..., -1:, :] * state + (k * until).transpose(-1, -2) @ u


def _linear_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of linear attention; g and beta are not looked at. Shapes as in `_delta_step`."""
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    scores = (q @ k.transpose(-1, -2)).tril()
    return q @ state + scores @ v, state + k.transpose(-1, -2) @ v
