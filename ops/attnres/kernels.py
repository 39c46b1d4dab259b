"""The AttnRes kernels: the mix of one site, and the two phases that take a block's sites together.

Mathematics: Attention Residuals (arXiv 2603.15031), block form. Rows r_0 .. r_{N-1} of the bank and the prefix r_N, query w,
key norm gamma:
    l_j = sum_d (w_d gamma_d) r_jd rsqrt(mean_d r_jd^2 + eps)      h = sum_j softmax(l)_j r_j
The values are the raw rows; all arithmetic is fp32 and h is rounded once, at the end.
"""

from __future__ import annotations

import math
from typing import Any

from k3dsl.language import (
    In,
    Out,
    Tile,
    bf16,
    cdiv,
    dot,
    exp2,
    f32,
    kernel,
    loop,
    maximum,
    ones,
    program_id,
    reciprocal,
    rsqrt,
    span,
    when,
    zeros,
)

LOG2E = math.log2(math.e)


def pieces(d: Any, c: Any) -> list[Any]:
    """Spans that cover a row of D channels, `width` each and a shorter last one: 7168 is seven pieces of 1024."""
    return [span(start, min(c.width, d.D - start)) for start in range(0, d.D, c.width)]


def row_sum(tiles: list[Tile]) -> Tile:
    """The sum over a row that is held in pieces: those of equal width are added first, so that few reductions remain."""
    added: dict[int, Tile] = {}
    for t in tiles:
        n = t.shape[1]
        added[n] = added[n] + t if n in added else t
    first, *rest = (t.sum(1) for t in added.values())
    for t in rest:
        first = first + t
    return first


def folded(query: Any, key_norm: Any, cols: list[Any]) -> list[Tile]:
    """The query times the key norm's weight, which the caller may have folded already."""
    weights = [query[x].to(f32) for x in cols]
    if key_norm is not None:
        weights = [w * key_norm[x].to(f32) for w, x in zip(weights, cols, strict=True)]
    return [w[None, :] for w in weights]


def logit(d: Any, c: Any, row: list[Tile], weights: list[Tile]) -> Tile:
    """A row's logit times log2(e), so that the softmax is in base 2."""
    squares = row_sum([x * x for x in row])
    products = row_sum([x * w for x, w in zip(row, weights, strict=True)])
    return products * rsqrt(squares / d.D + c.eps) * LOG2E


def add_row(top: Tile, total: Tile, mixed: list[Tile], score: Tile, row: list[Tile]) -> tuple[Tile, Tile, list[Tile]]:
    """One step of the online softmax: the running maximum, the denominator and the unnormalised mix with one more row."""
    higher = maximum(top, score)
    fade, share = exp2(top - higher), exp2(score - higher)
    mixed = [m * fade[:, None] + x * share[:, None] for m, x in zip(mixed, row, strict=True)]
    return higher, total * fade + share, mixed


def finish(d, c, cols, rows, mixed, total, h, normed, norm_weight):
    """Writes h, and its RMSNorm in Llama's form: of the rounded h, rounded again before the weight."""
    io = (h if h is not None else normed).dtype
    scale = reciprocal(total)[:, None]
    rounded = [(m * scale).to(io) for m in mixed]
    weights = [norm_weight[col].to(f32) for col in cols] if normed is not None else []
    write(cols, rows, rounded, h)
    if normed is None:
        return
    xs = [t.to(f32) for t in rounded]
    r = rsqrt(row_sum([x * x for x in xs]) / d.D + c.norm_eps)[:, None]
    for col, x, weight in zip(cols, xs, weights, strict=True):
        normed[rows, col] = ((x * r).to(io).to(f32) * weight[None, :]).to(io)


def write(cols, rows, tiles, target):
    """Stores a row's pieces, if there is somewhere to store them."""
    if target is not None:
        for col, t in zip(cols, tiles, strict=True):
            target[rows, col] = t


@kernel(grid=lambda d, c: (cdiv(d.T, c.rows),))
def site(
    d, c,
    bank=In("N T D", optional=True), logits=In("T N", f32, optional=True), prefix=In("T D"),
    query=In("D", optional=True), key_norm=In("D", optional=True), norm_weight=In("D", optional=True),
    h=Out("T D", optional=True), normed=Out("T D", optional=True), snapshot=Out("T D", optional=True),
):  # fmt: skip
    """`rows` tokens a program; every row of the bank is read once. The prefix comes first, so that without a bank h is it.

    With `logits` the bank's rows need no reduction: only the prefix is scored. snapshot: takes a copy of the prefix.
    """
    rows = span(program_id(0) * c.rows, c.rows, end=d.T)
    cols = pieces(d, c)
    last = [prefix[rows, x] for x in cols]
    write(cols, rows, last, snapshot)
    mixed = [t.to(f32) for t in last]
    total = ones((c.rows,), f32)
    if d.N == 0:
        finish(d, c, cols, rows, mixed, total, h, normed, norm_weight)
        return
    weights = folded(query, key_norm, cols)
    top = logit(d, c, mixed, weights)
    if logits is not None:
        total, mixed = with_logits(d, c, cols, rows, bank, logits, top, mixed)
    elif c.unroll:
        # the reads of the next rows stand before the reductions of this one, so that they are under way meanwhile
        held: list[list[Tile]] = []
        for j in range(d.N):
            while len(held) < min(d.N, j + 1 + c.ahead):
                held.append([bank[len(held), rows, x] for x in cols])
            row = [t.to(f32) for t in held[j]]
            top, total, mixed = add_row(top, total, mixed, logit(d, c, row, weights), row)
    else:

        @loop(d.N, init=(top, total, *mixed), label="rows")
        def carried(j, top, total, *mixed):
            row = [bank[j, rows, x].to(f32) for x in cols]
            top, total, added = add_row(top, total, list(mixed), logit(d, c, row, weights), row)
            return top, total, *added

        total, mixed = carried[1], list(carried[2:])
    finish(d, c, cols, rows, mixed, total, h, normed, norm_weight)


def with_logits(d, c, cols, rows, bank, logits, own, mixed):
    """The mix with the bank's logits known. Returns the denominator and the unnormalised mix."""
    scores = [logits[rows, j] * LOG2E for j in range(d.N)]
    top = own
    for s in scores:
        top = maximum(top, s)
    share = exp2(own - top, bound=0.0)  # top is the largest of them all
    total, mixed = share, [m * share[:, None] for m in mixed]
    for j, s in enumerate(scores):
        share = exp2(s - top, bound=0.0)
        total = total + share
        mixed = [m + bank[j, rows, x].to(f32) * share[:, None] for m, x in zip(mixed, cols, strict=True)]
    return total, mixed


@kernel(grid=lambda d, c: (cdiv(d.T, c.rows),))
def merge(
    d, c,
    top=In("T", f32), total=In("T", f32), mixed=In("T D", f32), prefix=In("T D"),
    query=In("D"), key_norm=In("D", optional=True), norm_weight=In("D", optional=True),
    h=Out("T D", optional=True), normed=Out("T D", optional=True), snapshot=Out("T D", optional=True),
):  # fmt: skip
    """Phase 2 of a site: the prefix joins the softmax over the bank that phase 1 left, largest logit, denominator and mix."""
    rows = span(program_id(0) * c.rows, c.rows, end=d.T)
    cols = pieces(d, c)
    last = [prefix[rows, x] for x in cols]
    write(cols, rows, last, snapshot)
    row = [t.to(f32) for t in last]
    score = logit(d, c, row, folded(query, key_norm, cols))
    before = [mixed[rows, x] for x in cols]
    _, denominator, after = add_row(top[rows] * LOG2E, total[rows], before, score, row)
    finish(d, c, cols, rows, after, denominator, h, normed, norm_weight)


@kernel(grid=lambda d, c: (cdiv(d.T, c.rows), d.N))
def norms(d, c, bank=In("N T D"), inv_rms=Out("N T", f32)):
    """Phase 1: 1 / sqrt(mean(r^2) + eps) of the bank's rows, the same for every query."""
    rows, j = span(program_id(0) * c.rows, c.rows, end=d.T), program_id(1)
    row = [bank[j, rows, x].to(f32) for x in pieces(d, c)]
    inv_rms[j, rows] = rsqrt(row_sum([x * x for x in row]) / d.D + c.eps)


@kernel(grid=lambda d, c: (cdiv(d.T, c.tokens), d.N))
def score(d, c, bank=In("N T D"), inv_rms=In("N T", f32), queries=In("S D"), logits=Out("S T N", f32)):
    """Phase 1: the logits of all sites against one row of the bank, as a product."""
    rows, j = span(program_id(0) * c.tokens, c.tokens, end=d.T), program_id(1)
    sites = span(0, c.sites, end=d.S if c.sites > d.S else None)

    @loop(cdiv(d.D, c.depth), init=zeros((c.tokens, c.sites), f32), label="width")
    def products(i, acc):
        cols = span(i * c.depth, c.depth, end=d.D if d.D % c.depth else None)
        r, w = bank[j, rows, cols], queries[sites, cols].to(f32)
        if c.precision != "bf16x3":
            return dot(r.to(f32), w.T, acc=acc, precision=c.precision)
        # rows are bf16 already and a query is three bf16 numbers, so that no product loses anything
        for part in three_parts(w):
            acc = dot(r, part.T, acc=acc)
        return acc

    logits[sites, rows, j] = (products * inv_rms[j, rows][:, None]).T


def three_parts(w: Tile) -> list[Tile]:
    """An fp32 tile as a sum of three bf16 ones: 24 bits."""
    parts = []
    for _ in range(3):
        part = w.to(bf16)
        parts.append(part)
        w = w - part.to(f32)
    return parts


@kernel(grid=lambda d, c: (d.T, cdiv(d.D, c.mix_width)))
def mix(
    d, c,
    bank=In("N T D"), logits=In("S T N", f32),
    top=Out("S T", f32), total=Out("S T", f32), mixed=Out("S T D", f32),
):  # fmt: skip
    """Phase 1: for one token and all sites the softmax over the bank, unnormalised; the bank is read once for all of them."""
    t, block = program_id(0), program_id(1)
    sites = span(0, c.sites, end=d.S if c.sites > d.S else None)
    cols = span(block * c.mix_width, c.mix_width, end=d.D if d.D % c.mix_width else None)
    scores = [logits[sites, t, j] for j in range(d.N)]
    highest = scores[0]
    for s in scores[1:]:
        highest = maximum(highest, s)
    denominator, out = zeros((c.sites,), f32), zeros((c.sites, c.mix_width), f32)
    for j, s in enumerate(scores):
        share = exp2((s - highest) * LOG2E, bound=0.0)  # highest is the largest of them
        denominator = denominator + share
        out = out + share[:, None] * bank[j, t, cols].to(f32)[None, :]
    mixed[sites, t, cols] = out

    @when(block == 0)
    def _():
        top[sites, t] = highest
        total[sites, t] = denominator
