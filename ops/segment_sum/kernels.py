"""Sums of ragged segments: out[n] = sum of values[cu_seqlens[n] : cu_seqlens[n + 1]]."""

from __future__ import annotations

from k3dsl.language import In, Out, cdiv, f32, i32, kernel, loop, program_id, span, zeros


@kernel(grid=lambda d, c: (d.N, cdiv(d.D, c.block_d)))
def segment_sum(d, c, values=In("T D"), cu_seqlens=In("N+1"), out=Out("N D")):
    """One segment, some columns. How often the loop runs is read from memory; an empty segment gives 0."""
    segment = program_id(0)
    begin, end = cu_seqlens[segment].to(i32), cu_seqlens[segment + 1].to(i32)
    cols = span(program_id(1) * c.block_d, c.block_d, end=d.D)

    @loop(cdiv(end - begin, c.block_t), init=zeros((c.block_t, c.block_d), f32), label="rows")
    def sums(i, acc):
        return acc + values[span(begin + i * c.block_t, c.block_t, end=end), cols].to(f32)

    out[segment, cols] = sums.sum(0).to(out.dtype)
