"""Gradients of the routed experts in plain torch, one block of rows after the other: right, slow, never waits for a GPU."""

from __future__ import annotations

import torch

from k3dsl.ops.moe.inputs import sorted_pairs

ROWS = 64


def _dequantized(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 in fp32 by arithmetic alone: a table would be copied from the host, which waits."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    size, mantissa = (codes & 7).int(), (codes & 1).float()
    value = torch.where(size < 2, mantissa * 0.5, torch.exp2((size >> 1).float() - 1.0) * (1.0 + 0.5 * mantissa))
    power = torch.where(scale == 255, torch.nan, torch.exp2(scale.float() - 127.0))
    return torch.where(codes >= 8, -value, value) * power.repeat_interleave(32, -1)


def _matrix(weight: torch.Tensor, scale: torch.Tensor | None, expert: torch.Tensor) -> torch.Tensor:
    """The weight of one expert, which only the device knows, in fp32."""
    chosen = weight.index_select(0, expert)[0]
    return chosen.float() if scale is None else _dequantized(chosen, scale.index_select(0, expert)[0])


def _slopes(
    gate: torch.Tensor, up: torch.Tensor, activation: str, beta: float, linear_beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation, and its derivatives to gate and up."""
    s = torch.sigmoid(gate)
    if activation == "silu":
        return gate * s * up, (s + gate * s * (1 - s)) * up, gate * s
    t, r = torch.tanh(gate / beta), torch.tanh(up / linear_beta)
    left, right = beta * t * s, linear_beta * r
    return left * right, ((1 - t * t) * s + beta * t * s * (1 - s)) * right, left * (1 - r * r)


def gradients(
    needed: tuple[bool, ...],
    grad: torch.Tensor,
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    activation: str,
    beta: float,
    linear_beta: float,
) -> list[torch.Tensor | None]:
    """Gradients of x, w_gate, w_up, w_down and weights from that of the output; None where not needed or packed.

    Each row is written once and sums run in a fixed order, so that repeats are equal bit for bit.
    """
    (T, D), K, E = x.shape, ids.shape[1], w_gate.shape[0]
    pairs, packed = T * K, gate_scale is not None
    order, slots, offsets = sorted_pairs(ids, E)
    counts = offsets.diff()
    blocks = (counts + (ROWS - 1)) // ROWS
    ends = blocks.cumsum(0)
    # a block may run past the last pair
    rows_x = torch.zeros((pairs + ROWS, D), dtype=torch.float32, device=x.device)
    rows_weight = torch.zeros(pairs + ROWS, dtype=torch.float32, device=x.device)
    made = [
        torch.zeros(w.shape, dtype=torch.float32, device=x.device) if need and not packed else None
        for w, need in zip((w_gate, w_up, w_down), needed[1:4], strict=True)
    ]
    bound = min(pairs, -(-pairs // ROWS) + E - 1) if w_gate.numel() else 0
    lanes = torch.arange(ROWS, device=x.device)
    for number in range(bound):
        block = torch.full((1,), number, device=x.device)
        expert = torch.searchsorted(ends, block, right=True)
        there, expert = expert < E, expert.clamp(max=E - 1)
        first = offsets[expert] + (block - (ends[expert] - blocks[expert])) * ROWS
        row = torch.where(there, first, 0) + lanes
        live = there & (row < offsets[expert + 1])
        pair = order[row.clamp(max=pairs - 1)].long()
        token, keep = pair // K, live[:, None]
        z = torch.where(keep, x[token].float(), 0.0)
        dy = torch.where(keep, grad[token].float(), 0.0)
        w1, w3 = _matrix(w_gate, gate_scale, expert), _matrix(w_up, up_scale, expert)
        w2 = _matrix(w_down, down_scale, expert)
        h, to_gate, to_up = _slopes(z @ w1.T, z @ w3.T, activation, beta, linear_beta)
        share = torch.where(live, weights.flatten()[pair], 0.0)[:, None]
        back = dy @ w2
        dh = share * back
        dgate, dup = dh * to_gate, dh * to_up
        # rows that are not live keep what they have
        rows_x[row] = torch.where(keep, dgate @ w1 + dup @ w3, rows_x[row])
        rows_weight[row] = torch.where(live, (back * h).sum(1), rows_weight[row])
        for into, left, right in zip(made, (dgate, dup, share * dy), (z, z, h), strict=True):
            if into is not None:
                into.index_add_(0, expert, (left.T @ right)[None])
    known, at = slots >= 0, slots.clamp(min=0).long()
    dx = torch.where(known[:, None], rows_x[at], 0.0).view(T, K, D).sum(1).to(x.dtype) if needed[0] else None
    dweights = torch.where(known, rows_weight[at], 0.0).view(T, K) if needed[4] else None
    return [
        dx,
        *(None if g is None else g.to(w.dtype) for g, w in zip(made, (w_gate, w_up, w_down), strict=True)),
        dweights,
    ]
