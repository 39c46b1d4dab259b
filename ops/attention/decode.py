"""Softmax attention over a cache of keys and values with a length of its own for every request, split along the keys."""

from __future__ import annotations

import math
from typing import Any

from k3dsl.language import (
    In,
    Out,
    arange,
    cdiv,
    dot,
    exp2,
    f32,
    full,
    i32,
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
from k3dsl.ops.attention.kernels import LOG2E

LOWEST = -3.4028234663852886e38
"""The lowest finite fp32: a running maximum that starts here never meets inf - inf, however many keys are hidden."""


@kernel(grid=lambda d, c: (cdiv(d.T, c.tokens) * c.splits, d.HK, d.B))
def attend(
    d, c,
    q=In("B T H D"), k_cache=In("B S HK D"), v_cache=In("B S HK V"), cache_seqlens=In("B", i32),
    o=Out("B T H V", optional=True), lse=Out("B H T", f32, optional=True),
    partial_o=Out("B T H splits V", f32, optional=True), partial_lse=Out("B T H splits", f32, optional=True),
):  # fmt: skip
    """`tokens` queries of all heads that share a key head, against one of `splits` parts of the keys that they see.

    A request of n keys: query i sees those up to i + n - T. Keys past n are never read."""
    pid, key_head, batch = program_id(0), program_id(1), program_id(2)
    split, block = (pid % c.splits, pid // c.splits) if c.splits > 1 else (0, pid)
    group = d.H // d.HK
    tokens = span(block * c.tokens, c.tokens, end=d.T)
    heads = span(key_head * group, c.group, end=(key_head + 1) * group if c.group != group else None)
    rows = c.tokens * c.group
    queries = q[batch, tokens, heads].reshape(rows, d.D)
    length = maximum(minimum(cache_seqlens[batch], d.S), 0)
    diagonal = block * c.tokens + (length - d.T)  # the last key that the first query sees, if not negative
    scale = c.scale * LOG2E

    seen = cdiv(maximum(minimum(diagonal + c.tokens, length), 0), c.block_k)
    per = cdiv(seen, c.splits) if c.splits > 1 else seen
    first = split * per if c.splits > 1 else 0
    last = minimum(first + per, seen) if c.splits > 1 else seen
    free = maximum(minimum(diagonal + 1, length), 0) // c.block_k  # blocks that every query sees whole
    middle = maximum(minimum(free, last), first) if c.splits > 1 else minimum(free, last)

    def step(edge: bool) -> Any:
        """One block of keys; at the edge, those past the end or above the diagonal are masked."""

        def body(j, top, total, acc):
            keys = span(j * c.block_k, c.block_k, end=length if edge else None)
            s = dot(queries, k_cache[batch, keys, key_head].T, precision=c.precision)
            if edge:
                token = (arange(rows) // c.group)[:, None]
                s = where(arange(c.block_k)[None, :] + j * c.block_k <= token + diagonal, s, -math.inf)
            higher = maximum(top, s.max(1) * scale)
            p = exp2(s * scale - higher[:, None], bound=1)  # at most 0 but for rounding: scale is positive
            fade = exp2(top - higher)
            acc = dot(
                p.to(v_cache.dtype), v_cache[batch, keys, key_head], acc=acc * fade[:, None], precision=c.precision
            )
            return higher, total * fade + p.sum(1), acc

        return body

    start = (full((rows,), LOWEST, f32), zeros((rows,), f32), zeros((rows, d.V), f32))
    inner = loop(middle, start=first, init=start, label="keys")(step(edge=False))
    top, total, acc = loop(last, start=middle, init=inner, label="edge")(step(edge=True))

    # without keys there is nothing to divide by: 0, and -inf for the log of the empty sum
    found = (acc * where(total > 0.0, reciprocal(total), 0.0)[:, None]).reshape(c.tokens, c.group, d.V)
    total_log = where(total > 0.0, top + log2(total), -math.inf).reshape(c.tokens, c.group)
    if c.splits > 1:
        partial_o[batch, tokens, heads, split] = found
        partial_lse[batch, tokens, heads, split] = total_log
        return
    o[batch, tokens, heads] = found.to(o.dtype)
    if lse is not None:
        lse[batch, heads, tokens] = (total_log / LOG2E).T


@kernel(grid=lambda d, c: (d.T, d.H, d.B))
def combine(
    d, c,
    partial_o=In("B T H splits V", f32), partial_lse=In("B T H splits", f32),
    o=Out("B T H V"), lse=Out("B H T", f32, optional=True),
):  # fmt: skip
    """Puts the parts of one query together, each weighed by its sum; parts without keys weigh 0."""
    token, head, batch = program_id(0), program_id(1), program_id(2)
    logs = partial_lse[batch, token, head]
    top = maximum(logs.max(0), LOWEST)
    weights = exp2(logs - top, bound=0.0)  # top is the largest of them
    total = weights.sum(0)
    mixed = (partial_o[batch, token, head] * weights[:, None]).sum(0)
    o[batch, token, head] = (mixed * where(total > 0.0, reciprocal(total), 0.0)).to(o.dtype)
    if lse is not None:
        lse[batch, head, token] = where(total > 0.0, (top + log2(total)) / LOG2E, -math.inf)
