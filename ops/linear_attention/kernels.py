"""KDA's relatives with a scalar decay a head or none: chunk factors, linear attention's scan, and one token of each.

With G the chunk-local cumulative log2 gate, now one number a token and head, KDA's factors (ops/kda/kernels.py) become
    A_ij = beta_i (k_i . k_j) 2^(G_i - G_j)  (j < i)      Aqk_ij = (q_i . k_j) 2^(G_i - G_j)  (j <= i)
    X = (I + A)^-1 diag(beta)    w = X (k 2^G)    qg = q 2^G    kg = k 2^(G_C - G)    decay = 2^(G_C)
so that KDA's scan carries the state unchanged. Without a gate (delta rule, arXiv 2406.06484) every power is 1; with one it is
the gated delta rule (arXiv 2412.06464). Linear attention (arXiv 2006.16236) has no correction either: R = v, and its factors
are q and k themselves.
"""

from __future__ import annotations

from typing import Any

from k3dsl.language import (
    In,
    InOut,
    Out,
    arange,
    assume,
    cdiv,
    cumsum,
    dot,
    exp2,
    f32,
    i32,
    kernel,
    loop,
    program_id,
    span,
    unit_lower_inverse,
    when,
    where,
    zeros,
)
from k3dsl.ops.kda.kernels import (
    LOG2E,
    initial_rows,
    norm_scale,
    store_inverse,
    store_state,
    valid_rows,
)

NORMALIZE_EPS = 1e-10
"""Added to linear attention's denominator."""


@kernel(grid=lambda d, c: (d.H, d.chunks, d.B))
def prep(
    d, c,
    q=In("B T HK K"), k=In("B T HK K"), g=In("B T H", optional=True), beta=In("B T H"),
    chunk_table=In("chunks 2", i32, optional=True),
    w=Out("B chunks H C K"), kg=Out("B chunks H C K"), qg=Out("B chunks H C K"),
    x=Out("B chunks H C XC"), aqk=Out("B chunks H C C"), decay=Out("B chunks H K", f32),
):  # fmt: skip
    """The chunk factors of one (head, chunk), as KDA's prep leaves them."""
    head, chunk, batch = program_id(0), program_id(1), program_id(2)
    out = (w, kg, qg, x, aqk, decay)
    if not c.varlen:
        rows = span(chunk * c.C, c.C, end=d.T if c.tail else None)
        factors(d, c, q, k, g, beta, out, head, batch, chunk, rows)
        return
    start = chunk_table[chunk, 0]

    @when(start >= 0)
    def _():
        rows = span(assume(start, min=0), c.C, end=chunk_table[chunk, 1])
        factors(d, c, q, k, g, beta, out, head, batch, chunk, rows)


def factors(d, c, q, k, g, beta, out, head, batch, chunk, rows):
    """One product for A and one for Aqk, whose results the decay scales.

    The decay from one token to another is the sum of the gates between them, summed directly: as a difference of cumulative
    sums it would lose the small gates that follow a very negative one. No exponent is above 0."""
    w, kg, qg, x, aqk, decay = out
    key_head = head // (d.H // d.HK)
    k_raw, q_raw = k[batch, rows, key_head], q[batch, rows, key_head]
    b = beta[batch, rows, head].to(f32)
    valid = valid_rows(c, rows, (c.C,))
    if valid is not None:
        b = where(valid, b, 0.0)
    kn, qn = norm_scale(c, k_raw.to(f32), 1, 1.0), norm_scale(c, q_raw.to(f32), 1, c.scale)

    i, j = arange(c.C)[:, None], arange(c.C)[None, :]
    kf, qf = k_raw.to(f32), q_raw.to(f32)
    kf, qf = kf * column(kn), qf * column(qn)
    # of the raw rows, whose products are exact: a q nearly orthogonal to its k would show the rounding of unit rows
    A = dot(k_raw, k_raw.T, precision=c.gram_precision) * column(kn) * line(kn)
    Q = dot(q_raw, k_raw.T, precision=c.gram_precision) * column(qn) * line(kn)
    k_start, q_start, k_end = kf, qf, kf
    total = zeros((), f32)
    if g is not None:
        gate = g[batch, rows, head].to(f32) * LOG2E
        if valid is not None:
            gate = where(valid, gate, 0.0)
        between = where(i > j, gate[:, None], 0.0)
        span_decay = exp2(cumsum(between, axis=0), bound=0.0)  # log decays are at most 0
        A, Q = A * span_decay, Q * span_decay
        since, until = exp2(cumsum(gate, axis=0), bound=0.0), exp2(between.sum(0), bound=0.0)
        k_start, q_start, k_end = kf * since[:, None], qf * since[:, None], kf * until[:, None]
        total = gate.sum(0)
    A, Q = where(i > j, A, 0.0), where(i >= j, Q, 0.0)
    aqk[batch, chunk, head] = Q.to(aqk.dtype)
    qg[batch, chunk, head] = q_start.to(qg.dtype)
    kg[batch, chunk, head] = k_end.to(kg.dtype)
    decay[batch, chunk, head] = exp2(total, bound=0.0).broadcast(d.K)
    inverse = unit_lower_inverse(A * b[:, None], method=c.inverse, precision=c.inverse_precision)
    xb = store_inverse(c, x, inverse * b[None, :], w.dtype, batch, chunk, head)
    w[batch, chunk, head] = dot(xb, k_start.to(w.dtype), precision=c.factor_precision).to(w.dtype)


def column(x: Any) -> Any:
    """A number a row, against a tile of rows; a plain number as it is."""
    return x if isinstance(x, (int, float)) else x[:, None]


def line(x: Any) -> Any:
    """A number a column, against a tile of columns; a plain number as it is."""
    return x if isinstance(x, (int, float)) else x[None, :]


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.N))
def linear(
    d, c,
    q=In("B T HK K"), k=In("B T HK K"), v=In("B T H V"), initial_state=In("N H SA SB", optional=True),
    cu_seqlens=In("N+1", optional=True), o=Out("B T H V"), final_state=Out("N H SA SB", optional=True),
):  # fmt: skip
    """Linear attention whole: S <- S + k v^T, o = S^T q. The state is kept as S^T [BV, K], as KDA's scan keeps it.

    Scores and state meet bf16 values in bf16, which has their range, and fp16 ones in tf32, which has fp16's precision."""
    block, head, sequence = program_id(0), program_id(1), program_id(2)
    key_head = head // (d.H // d.HK)
    cols = span(block * c.BV, c.BV)
    batch: Any = 0 if c.varlen else sequence
    if c.varlen:
        begin, end = cu_seqlens[sequence].to(i32), cu_seqlens[sequence + 1].to(i32)
        trips = cdiv(end - begin, c.C)
    else:
        trips, begin, end = cdiv(d.T, c.C), 0, d.T if c.tail else None
    s0 = zeros((c.BV, d.K), f32)
    if initial_state is not None:
        s0 = initial_rows(c, initial_state, sequence, head, cols)
    i, j = arange(c.C)[:, None], arange(c.C)[None, :]

    @loop(trips, init=(s0, zeros((d.K,), f32)) if c.normalize else (s0,), label="chunks")
    def carried(n, s, keys=None):
        rows = span(begin + n * c.C, c.C, end=end)
        q_n, k_n, v_n = q[batch, rows, key_head], k[batch, rows, key_head], v[batch, rows, head, cols]
        scores = where(j >= i, dot(k_n, q_n.T, precision=c.precision), 0.0)  # [key, query]
        v_t = v_n.T.to(c.operand)
        out = dot(v_t, scores.to(c.operand), precision=c.wide_precision)
        for part in parts(c, s):
            out = dot(part, q_n.T.to(c.operand), acc=out, precision=c.wide_precision)
        out = out * c.scale
        if c.normalize:
            before = (q_n.to(f32) * keys[None, :]).sum(1)
            out = out / ((before + scores.sum(0)) * c.scale + NORMALIZE_EPS)[None, :]
            keys = keys + k_n.to(f32).sum(0)
        o[batch, rows, head, cols] = out.to(o.dtype).T
        s = dot(v_n.T, k_n, acc=s, precision=c.precision)
        return (s, keys) if c.normalize else s

    store_state(c, final_state, carried[0], block, head, sequence)


def parts(c: Any, s: Any) -> list[Any]:
    """An fp32 state as operands of a product: itself, or its rounding to 16 bits and, with state_parts 2, the rest."""
    if c.operand == f32:
        return [s]
    high = s.to(c.operand)
    return [high] if c.state_parts == 1 else [high, (s - high.to(f32)).to(c.operand)]


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.B))
def token(
    d, c,
    q=In("B HK K"), k=In("B HK K"), v=In("B H V"), g=In("B H", optional=True), beta=In("B H", optional=True),
    state_indices=In("B", i32, optional=True), state=InOut("slots H SA SB"),
    o=Out("B H V"), new_state=Out("B H SA SB", optional=True),
):  # fmt: skip
    """One token of every sequence. The state is updated in place at its slot, or written to new_state.

    A negative slot is padding: its output is 0 and no state is touched."""
    block, head, batch = program_id(0), program_id(1), program_id(2)
    if state_indices is None:
        step(d, c, q, k, v, g, beta, state, o, new_state, block, head, batch, batch)
        return
    slot = state_indices[batch]

    @when(slot >= 0)
    def _():
        step(d, c, q, k, v, g, beta, state, o, new_state, block, head, batch, assume(slot, min=0))

    @when(slot < 0)
    def _():
        o[batch, head, span(block * c.BV, c.BV)] = zeros((c.BV,), o.dtype)


def step(d, c, q, k, v, g, beta, state, o, new_state, block, head, batch, slot):
    """S <- 2^gate S; u = beta (v - S^T k), or v where there is no beta; S <- S + k u^T; o = S^T q, on S^T [BV, K] in fp32."""
    cols = span(block * c.BV, c.BV)
    key_head = head // (d.H // d.HK)
    s = initial_rows(c, state, slot, head, cols)
    # all reads first: none waits for the sums, which end in barriers
    kf, qf, u = k[batch, key_head].to(f32), q[batch, key_head].to(f32), v[batch, head, cols].to(f32)
    decay = None if g is None else exp2(g[batch, head].to(f32) * LOG2E, bound=0.0)  # a log decay is at most 0
    b = None if beta is None else beta[batch, head].to(f32)
    kf, qf = kf * norm_scale(c, kf, 0, 1.0), qf * norm_scale(c, qf, 0, c.scale)
    if decay is not None:
        s = s * decay
    if b is not None:
        u = (u - (s * kf[None, :]).sum(1)) * b
    s = s + u[:, None] * kf[None, :]
    o[batch, head, cols] = (s * qf[None, :]).sum(1).to(o.dtype)
    target, index = (state, slot) if new_state is None else (new_state, batch)
    store_state(c, target, s, block, head, index)
