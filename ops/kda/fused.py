"""KDA in one kernel: the factors of a chunk are made where the state is carried, and never pass through memory."""

from __future__ import annotations

from typing import Any

from k3dsl.ir.types import DType
from k3dsl.language import (
    In,
    InOut,
    Out,
    Tile,
    bf16,
    cdiv,
    f32,
    i32,
    i64,
    kernel,
    loop,
    maximum,
    program_id,
    span,
    when,
    zeros,
)
from k3dsl.ops.kda.kernels import anchored_factors, chunk_step, initial_rows, level_factors, store_state
from k3dsl.ops.kda.segments import flag


class Kept:
    """Stands where `prep` has a record in memory: takes the tiles that it stores there, in the same dtype."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.tiles: list[Tile] = []

    def store(self, *index: Any, value: Tile, contiguity: int | None = None) -> None:
        self.tiles.append(value)

    def __setitem__(self, index: Any, value: Tile) -> None:
        self.tiles.append(value)

    def tile(self, *shape: int) -> Tile:
        """The first tile in the shape that the scan reads it in."""
        return self.tiles[0].reshape(*shape)


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.N))
def fused(
    d, c,
    q=In("B T HK K"), k=In("B T HK K"), v=In("B T H V"), g=In("B T H K"), beta=In("B T H"),
    A_log=In("H", f32, optional=True), dt_bias=In("H K", f32, optional=True),
    initial_state=In("N H SA SB", optional=True), cu_seqlens=In("N+1", optional=True),
    o=Out("B T H V"), final_state=Out("N H SA SB", optional=True), out_of_range=Out("N H V//BV", i32, optional=True),
):  # fmt: skip
    """prep and scan of one (V block, head, sequence), chunk by chunk; out_of_range as in `scan`."""
    block, head, sequence = program_id(0), program_id(1), program_id(2)
    tensors = (q, k, v, g, beta, A_log, dt_bias)
    s0, state, largest = carry(d, c, tensors, initial_state, cu_seqlens, o, block, head, sequence)
    store_state(c, final_state, state, block, head, sequence)
    if out_of_range is not None:
        out_of_range[sequence, head, block] = flag(c, state, s0, largest)


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.N))
def fused_again(
    d, c,
    out_of_range=In("N H V//BV", i32),
    q=In("B T HK K"), k=In("B T HK K"), v=In("B T H V"), g=In("B T H K"), beta=In("B T H"),
    A_log=In("H", f32, optional=True), dt_bias=In("H K", f32, optional=True),
    initial_state=In("N H SA SB", optional=True), cu_seqlens=In("N+1", optional=True),
    o=InOut("B T H V"), final_state=InOut("N H SA SB", optional=True),
):  # fmt: skip
    """Does again, with tf32 products in the scan, the blocks whose values fp16 could not hold; others end at once."""
    block, head, sequence = program_id(0), program_id(1), program_id(2)

    @when(out_of_range[sequence, head, block] != 0)
    def _():
        tensors = (q, k, v, g, beta, A_log, dt_bias)
        _, state, _ = carry(d, c, tensors, initial_state, cu_seqlens, o, block, head, sequence)
        store_state(c, final_state, state, block, head, sequence)


def carry(d, c, tensors, initial_state, cu_seqlens, o, block, head, sequence):
    """The loop over the chunks of a sequence. Returns the state before and after, and the elementwise largest |R|."""
    q, k, v, g, beta, A_log, dt_bias = tensors
    factors_of = anchored_factors if c.gram == "anchor" else level_factors
    operand = f32 if c.wide else c.factors
    cols = span(block * c.BV, c.BV)
    if c.varlen:
        # in 64 bits, because offsets are products of these
        batch, begin, end = 0, cu_seqlens[sequence].to(i64), cu_seqlens[sequence + 1].to(i64)
        trips = cdiv(end - begin, c.C).to(i32)
    else:
        batch, trips, begin, end = sequence, d.chunks, 0, d.T if c.tail else None
    s0 = zeros((c.BV, d.K), f32)
    if initial_state is not None:
        s0 = initial_rows(c, initial_state, sequence, head, cols)

    @loop(trips, init=(s0, zeros((c.BV, c.C), f32)) if c.guard else (s0,), label="chunks")
    def carried(i, s, largest=None):
        rows = span(begin + i * c.C, c.C, end=end)
        v_n = v[batch, rows, head, cols]
        w, kg, qg, aqk = (Kept(c.factors) for _ in range(4))
        x, decay = Kept(bf16 if c.split else c.factors), Kept(f32)
        factors_of(d, c, q, k, g, beta, A_log, dt_bias, (w, kg, qg, x, aqk, decay), head, batch, i, rows)
        high, low = x.tiles if c.split else (x.tiles[0], None)
        sb = s.to(operand)
        v_t = v_n.to(f32 if c.wide else x.dtype).T

        def write(out):
            o[batch, rows, head, cols] = out.to(o.dtype).T

        s, r = chunk_step(
            c, s, sb, v_t, w.tile(c.C, d.K), kg.tile(c.C, d.K), qg.tile(c.C, d.K), high, low, aqk.tile(c.C, c.C),
            decay.tile(d.K), write,
        )  # fmt: skip
        return (s, maximum(largest, abs(r))) if c.guard else s

    return s0, carried[0], carried[1] if c.guard else None
