"""What causal_conv1d computes, one token at a time in float64."""

from __future__ import annotations

from itertools import pairwise

import torch


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, P], weight [P, W], states [N, W-1, P] -> y [B, T, P] and the final states, in float64.

    The window of the last W inputs moves along each sequence: y_t = activation(sum_j w_j window_j). With cu_seqlens, B is 1;
    rows that belong to no sequence are 0.
    """
    taps = weight.reshape(weight.shape[0], -1).T.double()  # [W, P]
    rows = x.reshape(-1, x.shape[-1]).double()
    bounds = [(b * x.shape[1], (b + 1) * x.shape[1]) for b in range(x.shape[0])]
    if cu_seqlens is not None:
        bounds = list(pairwise(cu_seqlens.tolist()))
    y = torch.zeros_like(rows)
    states = rows.new_zeros((len(bounds), len(taps) - 1, rows.shape[1]))
    for n, (begin, end) in enumerate(bounds):
        past = states[n] if initial_state is None else initial_state[n].double()
        for t in range(begin, end):
            window = torch.cat([past, rows[t : t + 1]])
            out = (window * taps).sum(0) + (0.0 if bias is None else bias.double())
            y[t] = out if activation is None else out / (1 + torch.exp(-out))
            past = window[1:]
        states[n] = past
    return y.view(x.shape), states


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, Tq, P] or [B, P] and a pool [slots, W-1, P] -> y in x's shape and the pool after it, in float64; a request
    without a slot gives 0."""
    tokens = x if x.dim() == 3 else x[:, None]
    pool, y = conv_state.double(), torch.zeros_like(tokens, dtype=torch.float64)
    for b, slot in enumerate(range(len(tokens)) if slots is None else slots.tolist()):
        if slot >= 0:
            past = pool[slot : slot + 1].clone()
            one, after = causal_conv1d(tokens[b : b + 1], weight, bias, activation=activation, initial_state=past)
            y[b], pool[slot] = one[0], after[0]
    return y.view(x.shape), pool
