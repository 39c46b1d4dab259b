"""Where the chunks and segments of packed sequences lie, worked out on the device from cu_seqlens."""

from __future__ import annotations

from k3dsl.language import (
    In,
    Out,
    arange,
    cdiv,
    i32,
    kernel,
    loop,
    maximum,
    minimum,
    program_id,
    span,
    where,
    zeros,
)
from k3dsl.ops.packed import counted

BLOCK = 256
"""Rows of a table that a program writes at a time."""


@kernel(grid=lambda d, c: (d.N + 1,))
def chunk_tables(d, c, cu_seqlens=In("N+1"), chunk_offsets=Out("N+1", i32), chunk_table=Out("chunks 2", i32)):
    """The number of the first chunk of each sequence and of the end; and of each chunk its first row and its sequence's end.

    `chunks` is an upper bound; in rows past the last chunk the first row is -1. A program has one sequence, the last one
    what is left."""
    sequence = program_id(0)
    before = counted(cu_seqlens, sequence, lambda length: cdiv(length, c.C))
    begin, end = cu_seqlens[sequence].to(i32), cu_seqlens[minimum(sequence + 1, d.N)].to(i32)
    real = sequence < d.N
    count = where(real, cdiv(end - begin, c.C), d.chunks - before)
    chunk_offsets[sequence] = before

    @loop(cdiv(count, BLOCK), label="rows")
    def _(i):
        rows = span(before + i * BLOCK, BLOCK, end=before + count)
        chunk_table[rows, 0] = where(real, begin + (arange(BLOCK) + i * BLOCK) * c.C, -1)
        chunk_table[rows, 1] = where(real, zeros((BLOCK,), i32) + end, 0)


@kernel(grid=lambda d, c: (d.N + 1,))
def segment_tables(d, c, cu_seqlens=In("N+1"), segment_offsets=Out("N+1", i32), segment_table=Out("segments 2", i32)):
    """The same of segments, `segment_chunks` chunks each, a sequence's last one fewer: of each its sequence and its number
    within it. An empty sequence has one segment; in rows past the last the sequence is -1."""
    sequence = program_id(0)
    parts = lambda length: maximum(cdiv(cdiv(length, c.C), d.segment_chunks), 1)  # noqa: E731
    before = counted(cu_seqlens, sequence, parts)
    begin, end = cu_seqlens[sequence].to(i32), cu_seqlens[minimum(sequence + 1, d.N)].to(i32)
    real = sequence < d.N
    count = where(real, parts(end - begin), d.segments - before)
    segment_offsets[sequence] = before

    @loop(cdiv(count, BLOCK), label="rows")
    def _(i):
        rows = span(before + i * BLOCK, BLOCK, end=before + count)
        segment_table[rows, 0] = where(real, zeros((BLOCK,), i32) + sequence, -1)
        segment_table[rows, 1] = where(real, arange(BLOCK) + i * BLOCK, 0)
