"""Softmax attention, forward, in one pass over the keys (FlashAttention, arXiv 2205.14135; online softmax in base 2)."""

from __future__ import annotations

import math

from k3dsl.language import (
    In,
    Out,
    arange,
    cdiv,
    dot,
    exp2,
    f32,
    full,
    kernel,
    log2,
    loop,
    maximum,
    minimum,
    program_id,
    reciprocal,
    span,
    where,
    zeros,
)

LOG2E = math.log2(math.e)


@kernel(grid=lambda d, c: (cdiv(d.T, c.block_q), d.H, d.B))
def attention(
    d, c, q=In("B T H D"), k=In("B S HK D"), v=In("B S HK V"), o=Out("B T H V"), lse=Out("B H T", f32, optional=True)
):
    """One block of queries of one head. With `causal`, query i sees keys up to i + S - T; long blocks start first."""
    head, batch = program_id(1), program_id(2)
    block = cdiv(d.T, c.block_q) - 1 - program_id(0) if c.causal else program_id(0)
    key_head = head // (d.H // d.HK)
    rows = span(block * c.block_q, c.block_q, end=d.T)
    queries = q[batch, rows, head]
    diagonal = block * c.block_q + (d.S - d.T)  # the last key that the first query sees
    scale = c.scale * LOG2E

    def step(edge):
        """One block of keys; at the edge, those past the end or above the diagonal are masked."""

        def body(j, top, total, acc):
            keys = span(j * c.block_k, c.block_k, end=d.S if edge else None)
            s = dot(queries, k[batch, keys, key_head].T, precision=c.precision)
            if edge:
                column = arange(c.block_k)[None, :] + j * c.block_k
                last = arange(c.block_q)[:, None] + diagonal if c.causal else d.S - 1
                s = where(column <= (minimum(last, d.S - 1) if c.causal else last), s, -math.inf)
            higher = maximum(top, s.max(1) * scale)
            p = exp2(s * scale - higher[:, None], bound=1)  # at most 0 but for rounding: scale is positive
            fade = exp2(top - higher)
            acc = dot(p.to(v.dtype), v[batch, keys, key_head], acc=acc * fade[:, None], precision=c.precision)
            return higher, total * fade + p.sum(1), acc

        return body

    free = minimum(diagonal + 1, d.S) // c.block_k if c.causal else d.S // c.block_k
    end = cdiv(minimum(diagonal + c.block_q, d.S), c.block_k) if c.causal else cdiv(d.S, c.block_k)
    start = (full((c.block_q,), -math.inf, f32), zeros((c.block_q,), f32), zeros((c.block_q, d.V), f32))
    inner = loop(free, init=start, label="keys")(step(edge=False))
    top, total, acc = loop(end, start=free, init=inner, label="edge")(step(edge=True))

    o[batch, rows, head] = (acc * reciprocal(total)[:, None]).to(o.dtype)
    if lse is not None:
        lse[batch, head, rows] = (top + log2(total)) / LOG2E
