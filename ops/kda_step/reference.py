"""What a KDA decode step computes, request by request and token by token in float64, from the references of its parts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3dsl.ops.causal_conv1d.reference import causal_conv1d
from k3dsl.ops.gated_rmsnorm.reference import gated_rmsnorm
from k3dsl.ops.kda.reference import recurrence


class Step(NamedTuple):
    """o [B, Tq, H, V]; the pools after the last token; states [B, Tq, H, ...] and windows [B, Tq, W-1, C] after each one.

    The rows of padding are 0."""

    o: torch.Tensor
    state: torch.Tensor
    conv_state: torch.Tensor
    states: torch.Tensor
    windows: torch.Tensor


def kda_step(
    qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    g: torch.Tensor,
    beta: torch.Tensor,
    output_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    gate_activation: str = "sigmoid",
    state_v_first: bool = False,
) -> Step:
    """The arguments of `k3dsl.ops.kda_step`; all arithmetic and results in float64."""
    (B, T, H, K), V = g.shape, output_gate.shape[-1]
    x = qkv if isinstance(qkv, torch.Tensor) else torch.cat([part.reshape(B, T, -1) for part in qkv], -1)
    pool, conv_pool = state.double(), conv_state.double()
    o = torch.zeros_like(output_gate, dtype=torch.float64)
    states, windows = pool.new_zeros(B, T, *pool.shape[1:]), pool.new_zeros(B, T, *conv_pool.shape[1:])
    for b, slot in enumerate(range(B) if slots is None else slots.tolist()):
        if slot < 0:
            continue
        past, window = pool[slot : slot + 1], conv_pool[slot : slot + 1]
        for t in range(T):
            one = slice(t, t + 1)
            y, window = causal_conv1d(x[b : b + 1, one], conv_weight, initial_state=window)
            q, k, v = y.split([H * K, H * K, H * V], -1)
            out, after = recurrence(
                q.view(1, 1, H, K),
                k.view(1, 1, H, K),
                v.view(1, 1, H, V),
                g[b : b + 1, one],
                beta[b : b + 1, one],
                scale=scale,
                initial_state=past,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=lower_bound,
                A_log=A_log,
                dt_bias=dt_bias,
                state_v_first=state_v_first,
            )
            assert after is not None
            past = after
            o[b, t] = gated_rmsnorm(out[0, 0], output_gate[b, t], norm_weight, norm_eps, gate_activation)
            states[b, t], windows[b, t] = past[0], window[0]
        pool[slot], conv_pool[slot] = past[0], window[0]
    return Step(o, pool, conv_pool, states, windows)


def kda_commit(
    pool: torch.Tensor, kept: torch.Tensor, num_accepted: torch.Tensor, slots: torch.Tensor | None = None
) -> torch.Tensor:
    """The pool [size, ...] after taking over kept [B, Tq, ...] of the last accepted token of each request."""
    after = pool.clone()
    for b, slot in enumerate(range(len(kept)) if slots is None else slots.tolist()):
        accepted = min(int(num_accepted[b]), kept.shape[1])
        if slot >= 0 and accepted > 0:
            after[slot] = kept[b, accepted - 1]
    return after
