"""Kernels that choose experts: router logits, the selection of the best, and the order of tokens by expert."""

from __future__ import annotations

from k3dsl.language import (
    In,
    Out,
    arange,
    bf16,
    cdiv,
    cumsum,
    dot,
    exp,
    f16,
    f32,
    full,
    i32,
    kernel,
    loop,
    maximum,
    minimum,
    program_id,
    sigmoid,
    span,
    when,
    where,
    zeros,
)

INF = float("inf")
LOWEST = -3.4028234663852886e38
"""The least finite fp32 number."""
PARTS = {bf16: 1, f16: 2, f32: 3}
"""How many bf16 numbers add up to any number of a dtype."""
SUB = 16
"""Pairs that counting and ranking look at together."""
MANY = 1 << 30
"""More than there are blocks."""
TABLE = 16
"""Entries of the block table that a program writes."""


def parts(tile):
    """bf16 tiles that add up to the tile, the largest first; exact but for what is below the last of three."""
    found = [tile.to(bf16)]
    rest = tile
    for _ in range(PARTS[tile.dtype] - 1):
        rest = rest.to(f32) - found[-1].to(f32)
        found.append(rest.to(bf16))
    return found


@kernel(grid=lambda d, c: (cdiv(d.T, c.block_t), cdiv(d.E, c.block_e), c.splits))
def logits(d, c, x=In("T D"), weight=In("E D"), partial=Out("splits T E", f32)):
    """partial[s] = the part of x weight^T that the s-th piece of D contributes, as exact as fp32 sums are.

    fp32 factors are split into bf16 parts, so that matrix instructions form every product exactly; products below 2^-24 of
    the largest are left out. Experts stand in the rows: the parts of the weight are made in registers, and stay there.
    """
    tokens = span(program_id(0) * c.block_t, c.block_t, end=d.T)
    experts = span(program_id(1) * c.block_e, c.block_e, end=d.E)
    steps = cdiv(cdiv(d.D, c.block_k), c.splits)
    first = program_id(2) * steps

    @loop(steps, init=zeros((c.block_e, c.block_t), f32), label="k")
    def total(i, acc):
        inner = span((first + i) * c.block_k, c.block_k, end=d.D)
        ws, xs = parts(weight[experts, inner]), parts(x[tokens, inner])
        for n, w in enumerate(ws):
            for t in xs[: 3 - n]:
                acc = dot(w, t.T, acc=acc)
        return acc

    partial[program_id(2), tokens, experts] = total.T


@kernel(grid=lambda d, c: (cdiv(d.T, c.rows),))
def topk(
    d,
    c,
    partial=In("splits T E", f32),
    bias=In("E", f32, optional=True),
    weights=Out("T K", f32),
    ids=Out("T K", i32),
):
    """The K best experts of `rows` tokens by score + bias, ties to the lowest id, and their scores as weights.

    A NaN counts as less than any number, so that ids are always distinct and in range.
    """
    first = program_id(0) * c.rows
    tokens = span(first, c.rows, end=d.T)
    logit = partial[0, tokens, :]
    for s in range(1, c.splits):
        logit = logit + partial[s, tokens, :]
    if c.scoring == "softmax":
        top = logit.max(1, keepdim=True)
        scale = exp(logit - top)
        norm = scale.sum(1, keepdim=True)
        score = scale / norm
    else:
        score = sigmoid(logit)
    biased = score if bias is None else score + bias[:][None, :]
    biased = where(biased == biased, maximum(biased, LOWEST), -INF)
    lane = arange(d.E)[None, :].broadcast(c.rows, d.E)
    place = arange(d.K)[None, :].broadcast(c.rows, d.K)

    @loop(d.K, init=(biased, lane, full((c.rows, d.K), 0, i32)))
    def selected(i, value, position, chosen):
        best = value.max(1, keepdim=True)
        at = where(value == best, position, d.E).min(1, keepdim=True)  # a taken expert's position is E
        taken = lane == at
        return where(taken, -INF, value), where(taken, d.E, position), where(place == i, at, chosen)

    chosen = selected[2]
    row = minimum(first + arange(c.rows), d.T - 1)[:, None].broadcast(c.rows, d.K)
    picked = partial[0, row, chosen]
    for s in range(1, c.splits):
        picked = picked + partial[s, row, chosen]
    weight = exp(minimum(picked - top, 0.0)) / norm if c.scoring == "softmax" else sigmoid(picked)
    if c.renormalize:
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20)
    weights[tokens, :] = weight * c.scale if c.scale != 1.0 else weight
    ids[tokens, :] = chosen


# ---- order by expert ---------------------------------------------------------------------------------------------------
# A pair is one choice of one token, number t K + j. Pairs are counted into E + 1 bins, the last for those of no expert, in
# chunks; W lanes hold the bins. Everything is integers, so the order cannot vary.


def bins(d, ids, start, size):
    """The bin of `size` pairs from `start`: E for an id that is no expert, W (no bin) past the last pair."""
    found = ids[span(start, size, end=d.T * d.K)]
    known = where((found >= 0) & (found < d.E), found, d.E).to(i32)
    return where(start + arange(size) < d.T * d.K, known, d.W)


@kernel(grid=lambda d, c: (d.chunks,))
def count(d, c, ids=In("T*K"), counts=Out("chunks W", i32)):
    """How many pairs of a chunk each bin gets."""
    start = program_id(0) * c.chunk
    lane = arange(d.W)[None, :]

    @loop(c.chunk // SUB, init=zeros((d.W,), i32))
    def histogram(i, total):
        pairs = bins(d, ids, start + i * SUB, SUB)
        return total + (pairs[:, None] == lane).to(i32).sum(0)

    counts[program_id(0), :] = histogram


@kernel(grid=lambda d, c: (1,))
def offsets(
    d,
    c,
    counts=In("chunks W", i32),
    expert_offsets=Out("E+1", i32),
    block_offsets=Out("E+1", i32),
    base=Out("chunks W", i32),
):
    """Where each expert's rows and blocks of rows begin, and where those of each chunk do."""
    steps = cdiv(d.chunks, SUB)

    @loop(steps, init=zeros((d.W,), i32), label="totals")
    def total(i, known):
        return known + counts[span(i * SUB, SUB, end=d.chunks), :].sum(0)

    start = cumsum(total, 0) - total
    expert_offsets[span(0, d.W, end=d.E + 1)] = start
    blocks = where(arange(d.W) < d.E, cdiv(total, c.block_m), 0)
    block_offsets[span(0, d.W, end=d.E + 1)] = cumsum(blocks, 0) - blocks

    @loop(steps, init=start, label="chunks")
    def end(i, running):
        rows = span(i * SUB, SUB, end=d.chunks)
        tile = counts[rows, :]
        base[rows, :] = running[None, :] + cumsum(tile, 0) - tile
        return running + tile.sum(0)


@kernel(grid=lambda d, c: (d.chunks + cdiv(d.bound, TABLE),))
def place(
    d,
    c,
    ids=In("T*K"),
    base=In("chunks W", i32),
    expert_offsets=In("E+1", i32),
    block_offsets=In("E+1", i32),
    order=Out("T*K", i32),
    slots=Out("T*K", i32),
    block_expert=Out("bound", i32),
    block_row=Out("bound", i32),
):
    """order: the pairs by expert, stable; slots: its inverse, -1 for a pair of no expert; and the table of blocks."""
    program = program_id(0)

    @when(program < d.chunks)
    def pairs():
        start = program * c.chunk
        own = bins(d, ids, start, c.chunk)
        at = arange(c.chunk)

        @loop(c.chunk // SUB, init=zeros((c.chunk,), i32))
        def rank(i, known):
            other = bins(d, ids, start + i * SUB, SUB)
            before = i * SUB + arange(SUB)[None, :] < at[:, None]
            return known + ((own[:, None] == other[None, :]) & before).to(i32).sum(1)

        inside = start + at < d.T * d.K
        slot = base.load(program, minimum(own, d.E), mask=inside) + rank
        order.store(slot, value=start + at, mask=inside)
        slots[span(start, c.chunk, end=d.T * d.K)] = where(own < d.E, slot, -1)

    @when(program >= d.chunks)
    def blocks():
        entries = span((program - d.chunks) * TABLE, TABLE, end=d.bound)
        block = (program - d.chunks) * TABLE + arange(TABLE)
        # the blocks of expert e end where those of e + 1 begin
        ends = block_offsets.load(span(1, d.W, end=d.E + 1), other=MANY)
        expert = (ends[None, :] <= block[:, None]).to(i32).sum(1)
        row = expert_offsets[minimum(expert, d.E)] + (block - block_offsets[minimum(expert, d.E)]) * c.block_m
        block_expert[entries] = where(expert < d.E, expert, -1)
        block_row[entries] = where(expert < d.E, row, 0)
