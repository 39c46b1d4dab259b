"""Softmax over rows: o = exp(x - max x) / sum exp(x - max x), in fp32 and base 2."""

from __future__ import annotations

import math

from k3dsl.language import In, Out, cdiv, exp2, f32, full, kernel, loop, maximum, program_id, reciprocal, span, zeros

LOG2E = math.log2(math.e)
LOWEST = -3.4028234663852886e38
"""The lowest finite fp32: a running maximum that starts here never meets inf - inf, even in a row that is -inf so far."""


@kernel(grid=lambda d, c: (cdiv(d.R, c.rows),))
def softmax(d, c, x=In("R N"), o=Out("R N")):
    """`rows` rows a program, held whole when they fit one tile."""
    rows = span(program_id(0) * c.rows, c.rows, end=d.R)
    if c.passes == 2:
        two_passes(d, c, x, o, rows)
        return
    cols = span(0, c.block, end=d.N)
    z = x.load(rows, cols, other=-math.inf).to(f32)
    e = exp2((z - z.max(1, keepdim=True)) * LOG2E)
    o[rows, cols] = (e * reciprocal(e.sum(1, keepdim=True))).to(o.dtype)


def two_passes(d, c, x, o, rows):
    """Rows of any width: one pass for the maximum and the sum, rescaled as the maximum grows; another to write."""
    blocks = cdiv(d.N, c.block)
    start = (full((c.rows, 1), LOWEST, f32), zeros((c.rows, 1), f32))

    @loop(blocks, init=start, label="reduce")
    def statistics(i, top, total):
        z = x.load(rows, span(i * c.block, c.block, end=d.N), other=-math.inf).to(f32)
        higher = maximum(top, z.max(1, keepdim=True))
        e = exp2((z - higher) * LOG2E)
        return higher, total * exp2((top - higher) * LOG2E) + e.sum(1, keepdim=True)

    top, total = statistics
    scale = reciprocal(total)

    @loop(blocks, label="write")
    def write(i):
        cols = span(i * c.block, c.block, end=d.N)
        e = exp2((x[rows, cols].to(f32) - top) * LOG2E, bound=0)  # top is the maximum of the whole row
        o[rows, cols] = (e * scale).to(o.dtype)
