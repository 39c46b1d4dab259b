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
    span,
    where,
    zeros,
)
from k3dsl.ops.packed import part_of

BLOCK = 256
"""Rows of a table that a program writes at a time."""


@kernel(grid=lambda d, c: (d.N + 1,))
def chunk_tables(d, c, cu_seqlens=In("N+1"), chunk_offsets=Out("N+1", i32), chunk_table=Out("chunks 2", i32)):
    """The number of the first chunk of each sequence and of the end; and of each chunk its first row and its sequence's end.

    `chunks` is an upper bound; in rows past the last chunk the first row is -1. A program has one sequence, the last one
    what is left."""
    part = part_of(d, cu_seqlens, lambda length: cdiv(length, c.C), d.chunks)
    chunk_offsets[part.sequence] = part.before

    @loop(cdiv(part.count, BLOCK), label="rows")
    def _(i):
        rows = span(part.before + i * BLOCK, BLOCK, end=part.before + part.count)
        chunk_table[rows, 0] = where(part.real, part.begin + (arange(BLOCK) + i * BLOCK) * c.C, -1)
        chunk_table[rows, 1] = where(part.real, zeros((BLOCK,), i32) + part.end, 0)


@kernel(grid=lambda d, c: (d.N + 1,))
def segment_tables(d, c, cu_seqlens=In("N+1"), segment_offsets=Out("N+1", i32), segment_table=Out("segments 2", i32)):
    """The same of segments, `segment_chunks` chunks each, a sequence's last one fewer: of each its sequence and its number
    within it. An empty sequence has one segment; in rows past the last the sequence is -1."""
    segments_of = lambda length: maximum(cdiv(cdiv(length, c.C), d.segment_chunks), 1)  # noqa: E731
    part = part_of(d, cu_seqlens, segments_of, d.segments)
    segment_offsets[part.sequence] = part.before

    @loop(cdiv(part.count, BLOCK), label="rows")
    def _(i):
        rows = span(part.before + i * BLOCK, BLOCK, end=part.before + part.count)
        segment_table[rows, 0] = where(part.real, zeros((BLOCK,), i32) + part.sequence, -1)
        segment_table[rows, 1] = where(part.real, arange(BLOCK) + i * BLOCK, 0)
