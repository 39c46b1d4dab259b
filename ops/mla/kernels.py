"""The MLA kernels: expanded causal attention, absorbed attention over a paged latent cache with its combine, cache write.

Softmax is online and in base 2 (FlashAttention, arXiv 2205.14135). The running maximum starts at the least finite number, so
that a row which has seen no key yet is no special case: exp2(-inf - FLOOR) is 0, and no infinity meets another.
"""

from __future__ import annotations

import math

from k3dsl.language import (
    In,
    InOut,
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
    rsqrt,
    sigmoid,
    span,
    when,
    where,
    zeros,
)

LOG2E = math.log2(math.e)
FLOOR = -3.4028234663852886e38
SPLITS_AT_ONCE = 16
"""Partial results that a step of the combine reads together."""


# ---- prefill -------------------------------------------------------------------------------------------------------------


def query_blocks(d, c):
    """Blocks of queries of a head: of a dense sequence, or rows of the block table of packed ones."""
    return d.blocks if c.varlen else cdiv(d.T, c.block_q)


@kernel(grid=lambda d, c: (query_blocks(d, c) * c.head_group, d.H // c.head_group, d.B))
def mla_prefill(
    d,
    c,
    q=In("B T H D+E"),
    k_nope=In("B S H D"),
    k_pe=In("B S E"),
    v=In("B S H V"),
    gate=In("B T H V", optional=True),
    block_table=In("blocks 5", i32, optional=True),
    o=Out("B T H V"),
    lse=Out("B H T", f32, optional=True),
):
    """One block of queries of one head.

    score_ij = scale (q_i[:D] . k_nope_j + q_i[D:] . k_pe_j), k_pe shared by all heads; with `causal`, query i of a sequence
    sees keys up to i + S - T. Programs run head_group heads by head_group heads, in each group those with most keys first.
    """
    rank, lane = program_id(0) // c.head_group, program_id(0) % c.head_group
    head, batch = program_id(1) * c.head_group + lane, program_id(2)
    if c.varlen:
        first, q_end, k_start, keys, diagonal = (block_table[rank, column] for column in range(5))
        keys = minimum(keys, d.S)  # which it is; so where S is less than a block, it is seen that no block is whole
    else:
        first = (query_blocks(d, c) - 1 - rank if c.causal else rank) * c.block_q
        q_end, k_start, keys, diagonal = d.T, 0, d.S, first + (d.S - d.T)
    # diagonal: the last key that the first query sees; negative where it sees none
    rows = span(first, c.block_q, end=q_end)
    q_nope, q_pe = q[batch, rows, head, span(0, d.D)], q[batch, rows, head, span(d.D, d.E)]
    scale = c.scale * LOG2E

    def step(edge):
        """One block of keys; at the edge, those past the end or above the diagonal are masked."""

        def body(j, top, total, acc):
            here = span(k_start + j * c.block_k, c.block_k, end=k_start + keys if edge else None)
            s = dot(q_pe, k_pe[batch, here, :].T, precision=c.precision)
            s = dot(q_nope, k_nope[batch, here, head].T, acc=s, precision=c.precision)
            if edge:
                column = arange(c.block_k)[None, :] + j * c.block_k
                last = minimum(arange(c.block_q)[:, None] + diagonal, keys - 1) if c.causal else keys - 1
                s = where(column <= last, s, -math.inf)
            higher = maximum(top, s.max(1) * scale)
            # at most 0 but for the rounding of one product, which is under 1 for scores under 2^24
            p = exp2(s * scale - higher[:, None], bound=1)
            fade = exp2(top - higher)
            acc = dot(p.to(v.dtype), v[batch, here, head], acc=acc * fade[:, None], precision=c.precision)
            return higher, total * fade + p.sum(1), acc

        return body

    if c.causal:
        free = maximum(minimum(diagonal + 1, keys), 0) // c.block_k
        end = cdiv(maximum(minimum(diagonal + c.block_q, keys), 0), c.block_k)
    else:
        free, end = keys // c.block_k, cdiv(keys, c.block_k)
    start = (full((c.block_q,), FLOOR, f32), zeros((c.block_q,), f32), zeros((c.block_q, d.V), f32))
    inner = loop(free, init=start, label="keys")(step(edge=False))
    top, total, acc = loop(end, start=free, init=inner, label="edge")(step(edge=True))

    empty = total == 0.0
    out = where(empty[:, None], 0.0, acc * (1.0 / where(empty, 1.0, total))[:, None]).to(o.dtype)
    if gate is not None:
        out = (out.to(f32) * sigmoid(gate[batch, rows, head].to(f32))).to(o.dtype)
    o[batch, rows, head] = out
    if lse is not None:
        lse[batch, head, rows] = where(empty, -math.inf, (top + log2(where(empty, 1.0, total))) / LOG2E)


# ---- decode --------------------------------------------------------------------------------------------------------------


def share(keys, d, c):
    """(blocks of keys of a request, blocks of each of its splits): as even as whole blocks allow."""
    blocks = cdiv(keys, c.block_n)
    return blocks, cdiv(blocks, d.splits)


@kernel(grid=lambda d, c: (d.B * cdiv(d.R, c.block_h), d.splits))
def mla_decode(
    d,
    c,
    q=In("B R C+E"),
    kv_cache=In("pages page C+E"),
    page_table=In("B max_pages", i32),
    cache_seqlens=In("B", i32),
    o=Out("B R C", optional=True),
    lse=Out("B H T", f32, optional=True),
    o_partial=Out("B R splits C", f32, optional=True),
    lse_partial=Out("B R splits", f32, optional=True),
):
    """One split of the keys of one request, for one block of rows: row r is head r % H of query token r // H.

    A cached row is read once, whole as the key and its first C numbers as the value. With one split o and lse are final,
    else o_partial is that of the split alone and lse_partial its log2-sum-exp2; a split without keys writes only the latter.
    """
    row_blocks = (d.R + c.block_h - 1) // c.block_h
    request, row_block = program_id(0) // row_blocks, program_id(0) % row_blocks
    rows = span(row_block * c.block_h, c.block_h, end=d.R)
    latent_q, pe_q = q[request, rows, span(0, d.C)], q[request, rows, span(d.C, d.E)]
    keys = cache_seqlens[request]
    blocks, each = share(keys, d, c)
    split = program_id(1)
    start = split * each
    count = maximum(minimum(blocks - start, each), 0)
    ahead = d.T - 1 if c.causal else 0  # keys that the last query token sees and the first does not
    token = (row_block * c.block_h + arange(c.block_h)) // d.H
    limit = keys - ahead + token if ahead else keys  # row r sees keys below it

    def cached(position, edge):
        """The latents and shared keys of a block; rows past the request's end read as 0, whatever the pages hold."""
        if d.page % c.block_n == 0:
            page, offset = page_table[request, position // d.page], position % d.page
            here = span(offset, c.block_n, end=offset + (keys - position) if edge else None)
            return kv_cache[page, here, span(0, d.C)], kv_cache[page, here, span(d.C, d.E)]
        at = position + arange(c.block_n)
        inside = at < keys
        page = page_table.load(request, where(inside, at // d.page, 0), mask=inside)

        def gathered(first, width):
            mask = inside[:, None].broadcast(c.block_n, width)
            return kv_cache.load(page, at % d.page, span(first, width), mask=mask)

        return gathered(0, d.C), gathered(d.C, d.E)

    def step(edge):
        def body(j, top, total, acc):
            position = (start + j) * c.block_n
            latent, pe = cached(position, edge)
            s = dot(pe_q, pe.T, precision=c.precision)
            s = dot(latent_q, latent.T, acc=s, precision=c.precision)
            if edge:
                column = position + arange(c.block_n)[None, :]
                s = where(column < (limit[:, None] if ahead else limit), s, -math.inf)
            higher = maximum(top, s.max(1))
            # both at most 0: the difference is taken first, the scale is positive
            p = exp2((s - higher[:, None]) * scale, bound=0)
            fade = exp2((top - higher) * scale, bound=0)
            acc = dot(p.to(kv_cache.dtype), latent, acc=acc * fade[:, None], precision=c.precision)
            return higher, total * fade + p.sum(1), acc

        return body

    scale = c.scale * LOG2E
    carry = (full((c.block_h,), FLOOR, f32), zeros((c.block_h,), f32), zeros((c.block_h, d.C), f32))
    if c.tail == "apart":
        free = maximum(minimum(maximum(keys - ahead, 0) // c.block_n - start, count), 0)
        carry = loop(free, init=carry, label="keys")(step(edge=False))
        top, total, acc = loop(count, start=free, init=carry, label="edge")(step(edge=True))
    else:
        top, total, acc = loop(count, init=carry, label="keys")(step(edge=True))

    empty = total == 0.0
    out = where(empty[:, None], 0.0, acc * (1.0 / where(empty, 1.0, total))[:, None])
    log = where(empty, -math.inf, top * scale + log2(where(empty, 1.0, total)))
    if o_partial is not None:
        lse_partial[request, rows, split] = log

        @when(count > 0)
        def _():
            o_partial[request, rows, split, :] = out

        return
    o[request, rows, :] = out.to(o.dtype)
    if lse is not None and d.T == 1:
        lse[request, rows, 0] = log / LOG2E
    elif lse is not None:
        row = row_block * c.block_h + arange(c.block_h)
        lse.store(request, row % d.H, token, value=log / LOG2E, mask=row < d.R)


@kernel(grid=lambda d, c: (d.B * d.R,))
def mla_combine(
    d,
    c,
    o_partial=In("B R splits C", f32),
    lse_partial=In("B R splits", f32),
    cache_seqlens=In("B", i32),
    o=Out("B R C"),
    lse=Out("B H T", f32, optional=True),
):
    """o = sum_s w_s o_s / sum_s w_s with w_s = 2^(lse_s - max lse): one row, over the splits that have keys."""
    request, row = program_id(0) // d.R, program_id(0) % d.R
    blocks, each = share(cache_seqlens[request], d, c)
    used = cdiv(blocks, maximum(each, 1))

    @loop(
        cdiv(used, SPLITS_AT_ONCE),
        init=(full((1,), FLOOR, f32), zeros((1,), f32), zeros((1, d.C), f32)),
        label="splits",
    )
    def merged(i, top, total, acc):
        some = span(i * SPLITS_AT_ONCE, SPLITS_AT_ONCE, end=used)
        part = lse_partial.load(request, row, some, other=-math.inf)
        higher = maximum(top, part.max(0, keepdim=True))
        weight = exp2(part - higher, bound=0)  # higher is the maximum over these and earlier ones
        fade = exp2(top - higher)
        values = (weight[:, None] * o_partial[request, row, some, :]).sum(0, keepdim=True)
        return higher, total * fade + weight.sum(0, keepdim=True), acc * fade[:, None] + values

    top, total, acc = merged
    empty = total == 0.0
    out = where(empty[:, None], 0.0, acc / where(empty, 1.0, total)[:, None])
    o[request, span(row, 1), :] = out.to(o.dtype)
    if lse is not None:
        lse[request, row % d.H, span(row // d.H, 1)] = where(
            empty, -math.inf, (top + log2(where(empty, 1.0, total))) / LOG2E
        )


# ---- cache write ---------------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (d.N,))
def mla_cache_write(
    d,
    c,
    latent=In("N C"),
    k_pe=In("N E"),
    weight=In("C", optional=True),
    slot_mapping=In("N"),
    kv_cache=InOut("pages page C+E"),
):
    """kv_cache[slot] = [latent | k_pe] of one token, the latent normalised on the way where a weight is given."""
    token = program_id(0)
    slot = slot_mapping[token]

    @when(slot >= 0)
    def _():
        page, offset = slot // d.page, slot % d.page
        x = latent[token, :]
        if weight is not None:
            xf = x.to(f32)
            normed = (xf * rsqrt((xf * xf).sum(0) / d.C + c.eps)).to(x.dtype)
            x = (normed.to(f32) * weight[:].to(f32)).to(x.dtype)
        kv_cache[page, offset, span(0, d.C)] = x
        kv_cache[page, offset, span(d.C, d.E)] = k_pe[token, :]
