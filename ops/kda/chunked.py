"""KDA in its chunk form in plain differentiable torch: right and slow, it gives the gradients of the torch function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from k3dsl.ops.kda.reference import CuSeqlens, activate, sequence_bounds

CHUNK = 16
"""Tokens a step. The pairwise decays of one step take HV * CHUNK^2 * K numbers a sequence."""


def chunked(
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
    dtype: torch.dtype | None = None,
    chunk_size: int = CHUNK,
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes what `k3dsl.ops.kda.reference.recurrence` computes, ``chunk_size`` tokens a step, with autograd.

    Safe for gates without a lower bound: every exponent is a sum of the gates between two tokens, the later minus the
    earlier, and pairs in the other order are masked before the exponential, so neither values nor gradients overflow.
    In the backward pass each step is computed again; only the states between steps are kept.

    Args:
        As `recurrence`, except:
        dtype: of the arithmetic and of both results; None means float32, or float64 when q is float64.
        chunk_size: tokens a step.
        step: what one chunk does, for a relative of KDA; its g may be [B, T, HV]. None: `_step`.

    Returns:
        o [B, T, HV, V], zero in rows that belong to no sequence, and the final state [N, HV, K, V] (or [N, HV, V, K]
        with ``state_v_first``, or None without ``output_final_state``), both in ``dtype``.

    Source: Kimi Linear (arXiv 2510.26692), section 3; U and W of its chunk form are merged into one triangular solve.
    """
    if dtype is None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, tokens, _, width = q.shape
    heads, value_width = v.shape[-2:]
    scale = width**-0.5 if scale is None else scale
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

    # Longest sequence first: the sequences that still run at step i are the first `running[i]` states.
    bounds = sequence_bounds(cu_seqlens, batch, tokens)
    order = sorted(range(len(bounds)), key=lambda n: bounds[n][0] - bounds[n][1])
    device = v.device
    starts = torch.tensor([bounds[n][0] for n in order], dtype=torch.int64)
    ends = torch.tensor([bounds[n][1] for n in order], dtype=torch.int64)
    chunks = [-(-(bounds[n][1] - bounds[n][0]) // chunk_size) for n in order]
    running = [sum(c > i for c in chunks) for i in range(max(chunks, default=0))]

    # All chunks of all sequences as [chunks, chunk_size] rows, in the order of the steps that read them.
    lanes = torch.arange(chunk_size)
    steps = [starts[:n, None] + i * chunk_size + lanes for i, n in enumerate(running)]
    rows = torch.cat(steps) if steps else torch.zeros(0, chunk_size, dtype=torch.int64)
    limits = torch.cat([ends[:n] for n in running]) if steps else torch.zeros(0, dtype=torch.int64)
    valid = (rows < limits[:, None]).to(device)
    rows = rows.to(device)

    def take(x: torch.Tensor) -> list[torch.Tensor]:
        """[B, T, heads, ...] as one [n, heads, chunk_size, ...] a step. Rows past the end are 0, gates and betas too."""
        flat = x.to(dtype).flatten(0, 1)
        picked = flat[torch.where(valid, rows, 0)]
        mask = valid.view(*valid.shape, *[1] * (flat.dim() - 1))
        return list(torch.split(torch.where(mask, picked, 0.0).transpose(1, 2), running))

    state = torch.zeros(len(order), heads, width, value_width, dtype=dtype, device=device)
    places = torch.tensor(order, dtype=torch.int64, device=device)
    if initial_state is not None:
        given = initial_state.transpose(-1, -2) if state_v_first else initial_state
        state = state + given.to(dtype)[places]

    one_chunk = step or _step
    finished, outputs = [], []
    streams = zip(running, *(take(x) for x in (q * scale, k, v, g, beta)), strict=True) if running else ()
    for n, *inputs in streams:
        if n < state.shape[0]:
            finished.append(state[n:])
            state = state[:n]
        if torch.is_grad_enabled():
            o, state = checkpoint(one_chunk, state, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            o, state = one_chunk(state, *inputs)
        outputs.append(o.transpose(1, 2))
    finished.append(state)

    o = _unpack(outputs, rows[valid], valid, batch * tokens, (heads, value_width), dtype, device)
    o = o.view(batch, tokens, heads, value_width)
    if not output_final_state:
        return o, None
    final_state = torch.cat(finished[::-1])[places.argsort()]
    return o, final_state.transpose(-1, -2).contiguous() if state_v_first else final_state


def _unpack(
    outputs: list[torch.Tensor],
    rows: torch.Tensor,
    valid: torch.Tensor,
    tokens: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Puts the steps' outputs [n, chunk_size, HV, V] back as [tokens, HV, V]; rows of no sequence are 0."""
    o = torch.zeros(tokens, *shape, dtype=dtype, device=device)
    return o.index_put((rows,), torch.cat(outputs)[valid]) if outputs else o


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of C tokens: (o [n, HV, C, V], next state) from the state [n, HV, K, V] and activated, scaled inputs.

    q, k: [n, H, C, K]. v: [n, HV, C, V]. g: [n, HV, C, K]. beta: [n, HV, C].
    """
    size = g.shape[-2]
    group = g.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)[..., None]

    # span[i, j] = g_{j+1} + ... + g_i for j < i. Summed directly: as c_i - c_j it would lose the small gates that
    # follow a very negative one. Entries j >= i sum nothing and stay 0.
    span = torch.where(later, g.unsqueeze(-2), 0.0).cumsum(-3)
    decay = torch.where(later, span.exp(), 0.0)
    # A_ij = beta_i sum_d k_id k_jd exp(span_ijd) for j < i; P_ij = sum_d q_id k_jd exp(span_ijd) for j <= i
    pairs = decay * k.unsqueeze(-3)
    a = beta.unsqueeze(-1) * (pairs * k.unsqueeze(-2)).sum(-1)
    p = (pairs * q.unsqueeze(-2)).sum(-1) + torch.diag_embed((q * k).sum(-1))

    # u = (I + A)^-1 diag(beta) (V - (K * exp(c)) S), c_i = g_1 + ... + g_i
    from_start = g.cumsum(-2).exp()
    residual = beta.unsqueeze(-1) * (v - (k * from_start) @ state)
    u = torch.linalg.solve_triangular(a, residual, upper=False, unitriangular=True)
    # O = (Q * exp(c)) S + P u
    o = (q * from_start) @ state + p @ u
    # S <- diag(exp(c_C)) S + (K * exp(c_C - c))^T u
    to_end = span[..., -1, :, :].exp()
    state = from_start[..., -1, :].unsqueeze(-1) * state + (k * to_end).transpose(-1, -2) @ u
    return o, state
