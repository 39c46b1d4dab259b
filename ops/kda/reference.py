"""What KDA computes, one token at a time in float64: the definition that kernels and backends are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

L2NORM_EPS = 1e-6
"""Added to the sum of squares before the reciprocal square root, not to the mean and not to the norm."""

CuSeqlens = Sequence[int] | torch.Tensor | None
"""Cumulative sequence lengths [N+1] of a packed batch, on the host or on a device, or None for B equal lengths."""


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Divides each vector along the last dim by its length: ``x * rsqrt(sum(x^2) + 1e-6)``."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch.sigmoid, with a derivative that stays right where the value rounds to 1 (saturated gates, beta near 1)."""
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def activate(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turns raw inputs into what the recurrence uses. Differentiable; all arithmetic is in ``dtype``.

    - q, k: divided by their length if ``use_qk_l2norm_in_kernel``. The attention scale is not applied here.
    - g, the log decay in nats: as given, or with ``use_gate_in_kernel``
      ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`` when ``lower_bound`` is set (A_log None counts as 0), else
      ``-exp(A_log) * softplus(g + dt_bias)``.
    - beta: as given, or ``sigmoid(beta)``, or ``2 * sigmoid(beta)`` with ``allow_neg_eigval``.

    Args:
        q, k: [B, T, H, K]. g: [B, T, HV, K]. beta: [B, T, HV]. A_log: HV numbers. dt_bias: HV*K numbers.
            Any leading dims in place of B, T will do.
        dtype: dtype of the arithmetic and of the results.

    Returns:
        q, k, g, beta with their shapes unchanged.

    Source: Kimi Linear (arXiv 2510.26692) for the softplus gate, the Kimi K3 checkpoint for the bounded gate.
    """
    q, k, g, beta = (x.to(dtype) for x in (q, k, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        heads, width = g.shape[-2:]
        z = g if dt_bias is None else g + dt_bias.to(dtype).reshape(heads, width)
        rate = None if A_log is None else A_log.to(dtype).reshape(heads, 1).exp()
        if lower_bound is not None:
            g = lower_bound * sigmoid(z if rate is None else rate * z)
        elif rate is not None:
            g = -rate * F.softplus(z)
        else:
            raise ValueError("use_gate_in_kernel needs A_log or lower_bound")
    if use_beta_sigmoid_in_kernel:
        beta = sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
    return q, k, g, beta


def sequence_bounds(cu_seqlens: CuSeqlens, batch: int, tokens: int) -> list[tuple[int, int]]:
    """First and one-past-last row of every sequence in inputs flattened to [batch * tokens, ...]."""
    if cu_seqlens is None:
        return [(b * tokens, (b + 1) * tokens) for b in range(batch)]
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    return list(pairwise(ends))


@torch.no_grad()
def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: CuSeqlens = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs KDA token by token. No gradient, no input checks; see `k3dsl.ops.kda.check` for those.

    Per value head, with state S of shape [K, V] and value head h reading query/key head ``h // (HV // H)``::

        S <- diag(exp(g_t)) S
        u <- v_t - S^T k_t
        S <- S + beta_t k_t u^T
        o_t = scale * S^T q_t

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. g: [B, T, HV, K]. beta: [B, T, HV].
        scale: 1/sqrt(K) when None.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``; zeros when None.
        output_final_state: False returns None in place of the final state.
        cu_seqlens: N+1 offsets into T of packed sequences (B = 1), empty sequences allowed; None for N = B.
        state_v_first: both states are [N, HV, V, K].
        dtype: of the arithmetic and of both results.
        The remaining arguments: see `activate`.

    Returns:
        o [B, T, HV, V], zero in rows that belong to no sequence, and the final state (or None).

    Source: Kimi Linear (arXiv 2510.26692), section 3.
    """
    batch, tokens, _, width = q.shape
    heads, value_width = v.shape[-2:]
    group = heads // q.shape[-2]
    q, k, g, beta = activate(
        q,
        k,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        dtype=dtype,
    )
    q = q * (width**-0.5 if scale is None else scale)

    # Longest sequence first, so that the sequences still running at step t are the first `running[t]` states.
    bounds = sequence_bounds(cu_seqlens, batch, tokens)
    order = sorted(range(len(bounds)), key=lambda n: bounds[n][0] - bounds[n][1])
    lengths = [bounds[n][1] - bounds[n][0] for n in order]
    starts = torch.tensor([bounds[n][0] for n in order], dtype=torch.int64)
    running, alive = [], len(order)
    for t in range(max(lengths, default=0)):
        while lengths[alive - 1] <= t:
            alive -= 1
        running.append(alive)
    # Rows in the order in which the steps read them: all sequences' token 0, then all their token 1, and so on.
    steps = [starts[:n] + t for t, n in enumerate(running)]
    rows = torch.cat(steps) if steps else torch.zeros(0, dtype=torch.int64)
    rows = rows.to(v.device)
    q, k, v, g, beta = (x.to(dtype).flatten(0, 1)[rows] for x in (q, k, v, g, beta))
    alpha = g.exp()

    shape = (len(order), heads, width, value_width)
    state = torch.zeros(shape, dtype=dtype, device=v.device)
    places = torch.tensor(order, dtype=torch.int64, device=v.device)
    if initial_state is not None:
        given = initial_state.transpose(-1, -2) if state_v_first else initial_state
        state += given.to(dtype)[places]

    packed_o = torch.empty_like(v)
    row = 0
    for n in running:
        now = slice(row, row + n)
        row += n
        q_t = q[now].repeat_interleave(group, dim=1).unsqueeze(-2)
        k_t = k[now].repeat_interleave(group, dim=1).unsqueeze(-2)
        s = state[:n]
        s *= alpha[now].unsqueeze(-1)
        u = v[now].unsqueeze(-2) - k_t @ s
        s.addcmul_(k_t.transpose(-1, -2), u * beta[now, :, None, None])
        packed_o[now] = (q_t @ s).squeeze(-2)

    o = torch.zeros(batch * tokens, heads, value_width, dtype=dtype, device=v.device)
    o[rows] = packed_o
    o = o.view(batch, tokens, heads, value_width)
    if not output_final_state:
        return o, None
    final_state = torch.empty_like(state)
    final_state[places] = state
    return o, final_state.transpose(-1, -2).contiguous() if state_v_first else final_state
