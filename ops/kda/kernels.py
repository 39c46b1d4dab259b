"""The KDA kernels over whole sequences: prep (chunk factors) and scan (the state over chunks).

Mathematics: Kimi Linear report (arXiv 2510.26692), the chunkwise form. Per head, with G the chunk-local cumulative log2
gate, k and q normalised, q scaled:
    A_ij   = beta_i sum_d k_id k_jd 2^(G_id - G_jd)   (j < i)      X = (I + A)^-1 diag(beta)
    Aqk_ij = sum_d q_id k_jd 2^(G_id - G_jd)          (j <= i)
    w = X (k 2^G)    qg = q 2^G    kg = k 2^(G_C - G)    decay = 2^(G_C)
    R = X v - w S    o = qg S + Aqk R    S <- diag(decay) S + kg^T R
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from k3dsl.language import (
    In,
    InOut,
    Out,
    Tile,
    arange,
    assume,
    bf16,
    cdiv,
    cumsum,
    dot,
    exp,
    exp2,
    f16,
    f32,
    i32,
    kernel,
    loop,
    maximum,
    minimum,
    program_id,
    reciprocal,
    rsqrt,
    scalar,
    sigmoid,
    softplus,
    span,
    unit_lower_inverse,
    when,
    where,
    zeros,
)

LOG2E = math.log2(math.e)
NORM_EPS = 1e-6
ROWS = 16
"""Rows of a chunk that one thread holds, so that the cumulative sum needs no exchange between threads."""
OVERFLOW = 3.0e38
SMALLEST = 2.0**-11
"""Where the largest value is below this, fp16's smallest step costs more than its rounding."""
ANCHOR_LIMIT = 118
"""Largest anchor, log2: factors 2^anchor times a unit key stay finite in bf16 and fp32."""


def anchor_of(chunk: int, lower_bound: float) -> int:
    """Half the largest span of the cumulative gate over a chunk, in log2, rounded up.

    Row factors 2^(G + anchor) and column factors 2^-(G + anchor) then lie within 2^-anchor .. 2^anchor whatever the data,
    so the anchor depends on no token and outputs stay causal to the last bit.
    """
    return math.ceil(chunk * -lower_bound * LOG2E / 2)


def gate_rate(A_log: Any, head: Tile) -> Any:
    """exp(A_log): a trained parameter, far below the 88 at which fp32 overflows."""
    return exp(A_log[head], bound=88.0) if A_log is not None else 1.0


def log2_gate(c: Any, raw: Tile, head: Tile, cols: Any, A_log: Any, dt_bias: Any) -> Tile:
    """The activated gate times log2(e), at most 0. `raw` is the gate input; `cols` indexes the channels in its shape."""
    if c.gate == "none":
        return raw.to(f32) * LOG2E
    rate = gate_rate(A_log, head)
    if c.gate == "bounded":
        # y = -log2(e) rate (g + bias): the sigmoid is 1 / (1 + 2^y)
        slope = rate * -LOG2E
        y = raw.to(f32) * slope
        if dt_bias is not None:
            y = y + dt_bias[head, cols] * slope
        return (c.lower_bound * LOG2E) * reciprocal(1.0 + exp2(y), approx=c.approx)
    z = raw.to(f32)
    if dt_bias is not None:
        z = z + dt_bias[head, cols]
    return softplus(z) * (rate * -LOG2E)


def write_strength(c: Any, raw: Tile) -> Tile:
    """beta in fp32: as given, or the sigmoid of a logit, doubled where negative eigenvalues are allowed."""
    b = raw.to(f32)
    if c.beta_sigmoid:
        b = sigmoid(b)
    return b * 2.0 if c.neg_eigval else b


def norm_scale(c: Any, x: Tile, axis: int, scale: float) -> Any:
    """The factor that normalises rows of x (fp32) and scales them."""
    if not c.l2norm:
        return scale
    r = rsqrt((x * x).sum(axis) + NORM_EPS)
    return r * scale if scale != 1.0 else r


@kernel(grid=lambda d, c: (d.H, d.slice_chunks, d.B))
def prep(
    d, c,
    q=In("B T HK K"), k=In("B T HK K"), g=In("B T H K"), beta=In("B T H"),
    A_log=In("H", f32, optional=True), dt_bias=In("H K", f32, optional=True),
    chunk_table=In("chunks 2", i32, optional=True),
    w=Out("B chunks H C K"), kg=Out("B chunks H C K"), qg=Out("B chunks H C K"),
    x=Out("B chunks H C XC"), aqk=Out("B chunks H C C"), decay=Out("B chunks H K", f32),
):  # fmt: skip
    """The chunk factors of one (head, chunk): everything about a chunk that does not depend on the state.

    It makes those of a slice, `slice_chunks` chunks from number `first`."""
    head, chunk, batch = program_id(0), d.first + program_id(1), program_id(2)
    factors = anchored_factors if c.gram == "anchor" else level_factors
    out = (w, kg, qg, x, aqk, decay)

    def make(rows):
        factors(d, c, q, k, g, beta, A_log, dt_bias, out, head, batch, chunk, rows)

    if not c.varlen:
        each_tail(c, chunk * c.C, d.T if c.tail else None, make)
        return
    start = chunk_table[chunk, 0]

    @when(start >= 0)
    def _():
        each_tail(c, assume(start, min=0), chunk_table[chunk, 1], make)


def each_tail(c: Any, start: Any, end: Any, make: Callable[[Any], None]) -> None:
    """Makes the chunk of rows from `start`. With own_tails one that the sequence's end cuts short has code of its own, and the
    rest needs no masks."""
    if end is None:
        make(span(start, c.C))
    elif not c.own_tails:
        make(span(start, c.C, end=end))
    else:
        after = scalar(start + c.C)
        when(after <= end)(lambda: make(span(start, c.C)))
        when(after > end)(lambda: make(span(start, c.C, end=end)))


def valid_rows(c: Any, rows: Any, shape: tuple[int, ...]) -> Tile | None:
    """Which rows lie inside the sequence, or None when all do."""
    if rows.end is None:
        return None
    n = arange(c.C).reshape(*shape)
    return (n + rows.start) < rows.end


def anchored_factors(d, c, q, k, g, beta, A_log, dt_bias, out, head, batch, chunk, rows):
    """Bounded gates: one Gram product a chunk, with factors around a constant anchor."""
    w, kg, qg, x, aqk, decay = out
    anchor = anchor_of(c.C, c.lower_bound)
    down = 2.0**-anchor
    blocks = c.C // ROWS
    key_head = head // (d.H // d.HK)
    tall = rows.reshape(blocks, ROWS)
    cols = span(0, d.K).reshape(1, 1, d.K)

    b = write_strength(c, beta[batch, rows, head])
    kn, qn = 1.0, c.scale
    if c.l2norm:
        # a second, wide read of k and q, only for the norms: cheaper than a row sum in the layout of the rest
        k_wide = k[batch, rows, key_head].to(f32)
        kn = norm_scale(c, k_wide, 1, 1.0).reshape(blocks, ROWS)[:, :, None]
        q_wide = q[batch, rows, key_head].to(f32)
        qn = norm_scale(c, q_wide, 1, c.scale).reshape(blocks, ROWS)[:, :, None]

    gate = channel_gate(c, g, batch, tall, head, cols, A_log, dt_bias)
    k_raw = k.load(batch, tall, key_head, contiguity=c.vec)
    q_raw = q.load(batch, tall, key_head, contiguity=c.vec)
    valid = valid_rows(c, rows, (blocks, ROWS, 1))
    if valid is not None:
        gate = where(valid, gate, 0.0)
        b = where(valid_rows(c, rows, (c.C,)), b, 0.0)

    local = cumsum(gate, axis=1)
    total = local[:, ROWS - 1, :]
    if blocks == 1:
        last = total[:, None, :]
        G = local + float(anchor)
    else:
        first = total.select(0, 0)[None, None, :]
        last = total.sum(0)[None, None, :]
        block = arange(blocks).reshape(blocks, 1, 1)
        G = local + where(block == 0, float(anchor), first + float(anchor))
    up, back = exp2(G, bound=ANCHOR_LIMIT), exp2(-G, bound=ANCHOR_LIMIT)
    kf, qf = k_raw.to(f32) * kn, q_raw.to(f32) * qn
    k_up, q_up, k_back = kf * up, qf * up, kf * back
    k_rest = k_back * exp2(last + float(anchor), bound=ANCHOR_LIMIT)

    q_rows, k_rows = k_flat(c, d, q_up, c.gram_dtype), k_flat(c, d, k_up, c.gram_dtype)
    k_cols = k_flat(c, d, k_back, c.gram_dtype)
    qg.store(batch, chunk, head, tall_record(c), value=(q_up * down).to(qg.dtype), contiguity=c.vec)
    kg.store(batch, chunk, head, tall_record(c), value=k_rest.to(kg.dtype), contiguity=c.vec)
    decay.store(batch, chunk, head, cols, value=exp2(last), contiguity=c.vec)

    i, j = arange(c.C)[:, None], arange(c.C)[None, :]
    # above the diagonal the products may overflow; where() drops them, a product with a mask would not
    if 2 * c.C >= 64 and c.gram_dtype != f32:
        A, Q = both_triangles(c, (dot(in_eights(c, k_rows, q_rows), k_cols.T),))
    else:
        A, Q = dot(k_rows, k_cols.T), dot(q_rows, k_cols.T)
    A, Q = where(i > j, A, 0.0), where(i >= j, Q, 0.0)
    aqk[batch, chunk, head] = Q.to(aqk.dtype)
    inverse = unit_lower_inverse(A * b[:, None], method=c.inverse, precision=c.inverse_precision)
    xb = store_inverse(c, x, inverse * b[None, :], w.dtype, batch, chunk, head)
    if c.gram_dtype == w.dtype:
        w[batch, chunk, head] = (dot(xb, k_rows) * down).to(w.dtype)
    else:
        w[batch, chunk, head] = dot(xb, k_flat(c, d, k_up * down, w.dtype)).to(w.dtype)


def store_inverse(c, x, inverse, operand, batch, chunk, head):
    """Stores X and returns it as a product's operand.

    Beside fp16 factors X is kept as a bf16 pair, its rounding and the rest, because it meets v: bf16 values then need no
    conversion and keep their range."""
    if not c.split:
        xb = inverse.to(x.dtype)
        x[batch, chunk, head] = xb
        return xb
    high = inverse.to(bf16)
    x[batch, chunk, head, :, span(0, c.C)] = high
    x[batch, chunk, head, :, span(c.C, c.C)] = (inverse - high.to(f32)).to(bf16)
    return inverse.to(operand)


def channel_gate(c, g, batch, tall, head, cols, A_log, dt_bias):
    """Reads the gate in the layout [blocks, 16, K]; the bias is read first, which keeps that layout."""
    if c.gate == "bounded" and dt_bias is not None:
        slope = gate_rate(A_log, head) * -LOG2E
        bias = dt_bias.load(head, cols, contiguity=c.vec) * slope
        y = g.load(batch, tall, head, contiguity=c.vec).to(f32) * slope + bias
        return (c.lower_bound * LOG2E) * reciprocal(1.0 + exp2(y), approx=c.approx)
    if c.gate == "softplus" and c.approx:
        bias = dt_bias.load(head, cols, contiguity=c.vec) * LOG2E if dt_bias is not None else 0.0
        z = g.load(batch, tall, head, contiguity=c.vec).to(f32) * LOG2E + bias
        return log2_softplus(z) * -gate_rate(A_log, head)
    return log2_gate(c, g.load(batch, tall, head, contiguity=c.vec), head, cols, A_log, dt_bias)


def log2_softplus(z: Tile) -> Tile:
    """log2(1 + 2^z) with a relative error of at most 1e-6, however small it is.

    With y = 2^-|z| and s = y / (2 + y), which is at most 1/3, log(1 + y) = 2 artanh(s) = 2 s (1 + s^2/3 + s^4/5 + ...)."""
    y = exp2(-abs(z))
    s = y * reciprocal(2.0 + y, approx=True)
    t = s * s
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11)))))
    return maximum(z, 0.0) + s * series * (2.0 * LOG2E)


def k_flat(c, d, t, dtype):
    """[blocks, 16, K] as the [C, K] operand of a product."""
    return t.reshape(c.C, d.K).to(dtype)


def tall_record(c):
    """The rows of a chunk's record in the layout [blocks, 16]."""
    return span(0, c.C).reshape(c.C // ROWS, ROWS)


def level_factors(d, c, q, k, g, beta, A_log, dt_bias, out, head, batch, chunk, rows):
    """Any gate: the causal triangle by levels. At block size n, rows of an upper half meet columns of the lower half beside
    it; their decay is the product of the decays from the column to the border and from the border to the row. Both products
    grow by doubling from factors that are at most 1, and nothing is divided: no gate, however fast, can overflow."""
    w, kg, qg, x, aqk, decay = out
    blocks = c.C // ROWS
    key_head = head // (d.H // d.HK)
    tall = rows.reshape(blocks, ROWS)
    cols = span(0, d.K).reshape(1, 1, d.K)

    b = write_strength(c, beta[batch, rows, head])
    # a second, wide read of k and q for the sums over a row: cheaper than sums in the layout of the rest
    k_wide, q_wide = k[batch, rows, key_head].to(f32), q[batch, rows, key_head].to(f32)
    kn, qn = norm_scale(c, k_wide, 1, 1.0), norm_scale(c, q_wide, 1, c.scale)
    diagonal = (q_wide * k_wide).sum(1) * (kn * qn)
    k_norm, q_norm = (n.reshape(blocks, ROWS)[:, :, None] if isinstance(n, Tile) else n for n in (kn, qn))

    gate = channel_gate(c, g, batch, tall, head, cols, A_log, dt_bias)
    k_unit = k.load(batch, tall, key_head, contiguity=c.vec).to(f32) * k_norm
    q_unit = q.load(batch, tall, key_head, contiguity=c.vec).to(f32) * q_norm
    valid = valid_rows(c, rows, (blocks, ROWS, 1))
    if valid is not None:
        gate = where(valid, gate, 0.0)
        b = where(valid_rows(c, rows, (c.C,)), b, 0.0)
    if c.gram_dtype == f16:
        # half the registers; products with decays, which are rounded to fp16 too, then lose 2^-11 at most
        k_unit, q_unit = k_unit.to(f16), q_unit.to(f16)

    since = exp2(gate, bound=0.0)  # from the start of the row's block through the row; log decays are at most 0
    until: Any = None  # from after the row to the end of its block
    gram = None
    n = 1
    while n < ROWS:
        halves = (blocks, ROWS // (2 * n), 2, n, d.K)
        upper = arange(2).reshape(1, 1, 2, 1, 1) == 1
        before, after = since.reshape(*halves), 1.0 if until is None else until.reshape(*halves)
        by = where(upper, before, after).reshape(blocks, ROWS, d.K)
        gram = with_level(c, gram, n, decayed(c, k_unit, by), decayed(c, q_unit, by))
        ends = since.reshape(blocks, ROWS // (2 * n), 2 * n, d.K)
        low, high = (ends.select(2, last)[:, :, None, None] for last in (n - 1, 2 * n - 1))
        since = (before * where(upper, low, 1.0)).reshape(blocks, ROWS, d.K)
        until = (where(upper, 1.0, high) * after).broadcast(*halves).reshape(blocks, ROWS, d.K)
        n *= 2
    total = since.select(1, ROWS - 1)
    m = 1
    while m < blocks:
        upper = (arange(blocks) // m % 2).reshape(blocks, 1, 1) == 1
        by = where(upper, since, until)
        gram = with_level(c, gram, m * ROWS, decayed(c, k_unit, by), decayed(c, q_unit, by))
        pairs = total.reshape(blocks // (2 * m), 2, d.K)
        low, high = pairs.select(1, 0), pairs.select(1, 1)
        spread = (blocks // (2 * m), 2 * m, d.K)
        low_rows, high_rows = (t[:, None].broadcast(*spread).reshape(blocks, 1, d.K) for t in (low, high))
        since = since * where(upper, low_rows, 1.0)
        until = until * where(upper, 1.0, high_rows)
        total = low * high
        m *= 2

    k_start = k_flat(c, d, k_unit * since.to(k_unit.dtype), w.dtype)
    qg.store(batch, chunk, head, tall_record(c), value=(q_unit * since.to(q_unit.dtype)).to(qg.dtype), contiguity=c.vec)
    kg.store(batch, chunk, head, tall_record(c), value=(k_unit * until.to(k_unit.dtype)).to(kg.dtype), contiguity=c.vec)
    decay.store(batch, chunk, head, cols, value=total.reshape(1, 1, d.K), contiguity=c.vec)

    i, j = arange(c.C)[:, None], arange(c.C)[None, :]
    A, Q = both_triangles(c, gram)
    aqk[batch, chunk, head] = where(i == j, diagonal[:, None], Q).to(aqk.dtype)
    inverse = unit_lower_inverse(A * b[:, None], method=c.inverse, precision=c.inverse_precision)
    xb = store_inverse(c, x, inverse * b[None, :], w.dtype, batch, chunk, head)
    w[batch, chunk, head] = dot(xb, k_start, precision=c.factor_precision).to(w.dtype)


def decayed(c, t, by):
    """Rows [blocks, 16, K] times their decays, as the [C, K] operand of a level's product."""
    return (t * by.to(t.dtype)).reshape(c.C, t.shape[2]).to(c.gram_dtype)


def with_level(c, gram, n, k_rows, q_rows):
    """gram with the products of the rows and columns that meet at block size n.

    gram is what both_triangles takes apart: from 64 rows on one matrix, 8 rows of k's, the same 8 of q's and so on, because
    one wgmma then serves both and every thread has both results of its rows (in fp32 too, where it saves registers); else
    one matrix each."""
    row = arange(c.C)
    rows: tuple[Tile, ...] = (k_rows, q_rows)
    if 2 * c.C >= 64 or c.gram_dtype == f32:
        rows = (in_eights(c, k_rows, q_rows),)
        row = arange(2 * c.C)
        row = row // 16 * 8 + row % 8
    i, j = row[:, None], arange(c.C)[None, :]
    pair = (i // n == j // n + 1) & (i // (2 * n) == j // (2 * n))

    def added(left, so_far):
        # so_far is still 0 where this level's pairs are. As the accumulator it has to be done before the product begins,
        # which keeps the products of all levels from waiting in registers
        product = dot(left, k_rows.T, acc=so_far, precision=c.gram_precision)
        return where(pair, product, 0.0 if so_far is None else so_far)

    return tuple(added(left, so_far) for left, so_far in zip(rows, gram or (None, None), strict=False))


def in_eights(c, k_rows, q_rows):
    """[2 C, K]: 8 rows of k's, the same 8 of q's and so on."""
    width = k_rows.shape[1]
    part, eights = arange(2).reshape(1, 2, 1, 1), (c.C // 8, 1, 8, width)
    return where(part == 0, k_rows.reshape(*eights), q_rows.reshape(*eights)).reshape(2 * c.C, width)


def both_triangles(c, gram):
    """The products of k's rows and those of q's, [C, C] each."""
    if len(gram) == 2:
        return gram
    eights = gram[0].reshape(c.C // 8, 2, 8, c.C)
    return tuple(eights.select(1, part).reshape(c.C, c.C) for part in range(2))


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.N))
def scan(
    d, c,
    v=In("B T H V"), w=In("B chunks H C K"), kg=In("B chunks H C K"), qg=In("B chunks H C K"),
    x=In("B chunks H C XC"), aqk=In("B chunks H C C"), decay=In("B chunks H K", f32),
    initial_state=In("N H SA SB", optional=True), cu_seqlens=In("N+1", optional=True),
    chunk_offsets=In("N+1", i32, optional=True),
    o=Out("B T H V"), final_state=Out("N H SA SB", optional=True), carried=InOut("N H V K", f32, optional=True),
    out_of_range=Out("N H V//BV", i32, optional=True), seen=InOut("N H V//BV", f32, optional=True),
):  # fmt: skip
    """Carries the state over the chunks of one sequence. It is kept as S^T [BV, K], the register operand of every product.

    With fp16 factors the state and R pass through fp16, and out_of_range says whether that could hold them: an overflow
    leaves the state infinite or NaN for good, so its end shows it, and values too small for fp16 show in the largest one.

    Of a sequence cut into slices it does slice number `part`, see `slice_of`.
    """
    block, head, sequence = program_id(0), program_id(1), program_id(2)
    place = slice_of(d, c, sequence, cu_seqlens, chunk_offsets)
    factors = (w, kg, qg, x, aqk, decay)
    cols = span(block * c.BV, c.BV)

    def run():
        s0, state, largest = carry(d, c, v, factors, initial_state, carried, o, place, block, head, sequence)
        top: Any = None
        if out_of_range is not None:
            top = maximum(largest.max(1).max(0), abs(s0).max(1).max(0))
            if place.starts is not None:
                # the largest of the whole sequence; of the states that come in only the initial one counts
                before, own = seen[sequence, head, block], largest.max(1).max(0)
                top = where(place.starts, top, maximum(before, own))

        def end():
            store_state(c, final_state, state, block, head, sequence)
            if out_of_range is not None:
                lost = (~(abs(state) < OVERFLOW)).any(1).any(0)
                out_of_range[sequence, head, block] = (lost | ((top > 0.0) & (top < SMALLEST))).to(i32)

        if place.ends is None:
            end()
            return
        when(place.ends)(end)

        @when(~place.ends)
        def _():
            carried[sequence, head, cols] = state
            if out_of_range is not None:
                seen[sequence, head, block] = top

    if place.here is None:
        run()
    else:
        when(place.here)(run)


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.N))
def rescan(
    d, c,
    out_of_range=In("N H V//BV", i32),
    v=In("B T H V"), w=In("B chunks H C K"), kg=In("B chunks H C K"), qg=In("B chunks H C K"),
    x=In("B chunks H C XC"), aqk=In("B chunks H C C"), decay=In("B chunks H K", f32),
    initial_state=In("N H SA SB", optional=True), cu_seqlens=In("N+1", optional=True),
    chunk_offsets=In("N+1", i32, optional=True),
    o=InOut("B T H V"), final_state=InOut("N H SA SB", optional=True),
):  # fmt: skip
    """Does again, with tf32 products, the blocks whose values fp16 could not hold; for all others it ends at once."""
    block, head, sequence = program_id(0), program_id(1), program_id(2)

    @when(out_of_range[sequence, head, block] != 0)
    def _():
        place = slice_of(d, c, sequence, cu_seqlens, chunk_offsets)
        factors = (w, kg, qg, x, aqk, decay)
        _, state, _ = carry(d, c, v, factors, initial_state, None, o, place, block, head, sequence)
        store_state(c, final_state, state, block, head, sequence)


class Slice(NamedTuple):
    """The part of a sequence that one scan does. chunk, trips: its first chunk and their number; begin, end: its first row, and
    the sequence's end where that may cut a chunk. starts, ends: whether the sequence does so in it; here: whether it has any
    part of the sequence. None: always."""

    batch: Any
    chunk: Any
    trips: Any
    begin: Any
    end: Any
    starts: Any = None
    ends: Any = None
    here: Any = None


def slice_of(d, c, sequence, cu_seqlens, chunk_offsets):
    """The chunks of a sequence among the `slice_chunks` of all chunks from number `first`: all of them with one slice.

    A slice starts from the state that the one before left in `carried`. Chunks are numbered from the start of each sequence,
    or through all packed ones."""
    if c.varlen:
        begin, end = cu_seqlens[sequence].to(i32), cu_seqlens[sequence + 1].to(i32)
        chunk, chunks = chunk_offsets[sequence], cdiv(end - begin, c.C)
        if not c.sliced:
            return Slice(0, chunk, chunks, begin, end)
        skipped = maximum(d.first - chunk, 0)
        until = minimum(d.first + d.slice_chunks - chunk, chunks)
        trips = maximum(until - skipped, 0)
        # an empty sequence is where its first chunk would be
        starts = (chunk >= d.first) & (chunk < d.first + d.slice_chunks)
        ends = chunk + chunks <= d.first + d.slice_chunks
        return Slice(0, chunk + skipped, trips, begin + skipped * c.C, end, starts, ends, starts | (trips > 0))
    end = d.T if c.tail else None
    if not c.sliced:
        return Slice(sequence, 0, d.chunks, 0, end)
    part = scalar(d.part)
    return Slice(sequence, d.first, d.slice_chunks, d.first * c.C, end, part == 0, part + 1 == scalar(d.parts))


def carry(d, c, v, factors, initial_state, carried, o, place, block, head, sequence):
    """The loop over the chunks of a slice. Returns the state before and after, and the largest |R|; see over_chunks."""
    cols = span(block * c.BV, c.BV)
    s0 = zeros((c.BV, d.K), f32)
    if initial_state is not None:
        s0 = initial_rows(c, initial_state, sequence, head, cols)
    if place.starts is not None:
        s0 = where(place.starts, s0, carried[sequence, head, cols])
    state, largest = over_chunks(
        c, v, factors, o, s0, place.batch, head, cols, place.chunk, place.trips, place.begin, place.end
    )
    return s0, state, largest


def initial_rows(c, initial_state, sequence, head, cols):
    """A V block of a sequence's (or slot's) state as S^T [BV, K] in fp32."""
    s0 = initial_state[sequence, head, cols] if c.v_first else initial_state[sequence, head, :, cols].T
    return s0.to(f32)


def over_chunks(c, v, factors, o, s0, batch, head, cols, first, trips, begin, end):
    """Carries S^T [BV, K] over `trips` chunks from number `first`, whose rows start at `begin`; rows at `end` and past it
    are no tokens. o None: no output. Returns the state and, with the guard, the elementwise largest |R| of all chunks."""
    w, kg, qg, x, aqk, decay = factors
    operand = f32 if c.wide else w.dtype

    @loop(trips, init=(s0, zeros((c.BV, c.C), f32)) if c.guard else (s0,), label="chunks")
    def carried(i, s, largest=None):
        rows = span(begin + i * c.C, c.C, end=end)
        n = first + i
        w_n, kg_n = w[batch, n, head], kg[batch, n, head]
        qg_n = qg[batch, n, head] if o is not None else None
        v_n = v[batch, rows, head, cols]
        aqk_n = aqk[batch, n, head] if o is not None else None
        decay_n = decay[batch, n, head]
        sb = s.to(operand)
        v_t = v_n.to(f32 if c.wide else x.dtype).T
        if c.split:
            high, low = x[batch, n, head, :, span(0, c.C)], x[batch, n, head, :, span(c.C, c.C)]
        else:
            high, low = x[batch, n, head], None

        def write(out):
            o[batch, rows, head, cols] = out.to(o.dtype).T

        s, r = chunk_step(c, s, sb, v_t, w_n, kg_n, qg_n, high, low, aqk_n, decay_n, write)
        return (s, maximum(largest, abs(r))) if c.guard else s

    return carried[0], carried[1] if c.guard else None


def chunk_step(c, s, sb, v_t, w_n, kg_n, qg_n, high, low, aqk_n, decay_n, write):
    """One chunk on S^T. sb: the state as an operand. high, low: X, or its rounding and the rest. write: takes the output's
    transpose [BV, C] in fp32; where there is no output, qg_n and aqk_n are None. Returns the next state and R^T [BV, C]."""

    def product(a, b, acc=None):
        return dot(a, b, acc=acc, precision=c.scan_precision if a.dtype == f32 else None)

    r = product(v_t, high.to(v_t.dtype).T)
    if low is not None:
        r = product(v_t, low.to(v_t.dtype).T, acc=r)
    r = r - product(sb, w_n.to(sb.dtype).T)
    rb = r.to(sb.dtype)
    if qg_n is not None:
        out = product(sb, qg_n.to(sb.dtype).T)
        out = product(rb, aqk_n.to(sb.dtype).T, acc=out)
        write(out)
    s = product(rb, kg_n.to(sb.dtype), acc=s * decay_n[None, :])
    return s, r


def store_state(c, final_state, state, block, head, sequence):
    """Writes a V block of a state, if it is wanted, in the layout asked for."""
    if final_state is None:
        return
    cols = span(block * c.BV, c.BV)
    last = state.to(final_state.dtype)
    if c.v_first:
        final_state[sequence, head, cols] = last
    else:
        final_state[sequence, head, :, cols] = last.T
