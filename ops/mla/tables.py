"""The blocks of packed sequences in the order in which they run, worked out on the device."""

from __future__ import annotations

from k3dsl.language import In, Out, arange, cdiv, i32, kernel, loop, maximum, minimum, program_id, span, where, zeros
from k3dsl.ops.packed import part_of

BLOCK = 128
"""Rows of a table that a program handles at a time."""
OTHERS = 32
"""Rows that it compares them with at a time."""
SEEN = 5
"""The column of `blocks` that orders its rows."""


@kernel(grid=lambda d, c: (d.N + 1,))
def blocks(d, c, cu_seqlens=In("N+1", i32), cu_seqlens_k=In("N+1", i32), found=Out("blocks 6", i32)):
    """A row a block of queries: its first row and the end of its sequence's rows, the sequence's first key and number of keys,
    the last of these that the block's first query sees under a causal mask (negative for none), and how many keys the block
    sees: -1 in rows of zeros past the last block. `blocks` is an upper bound. A program has one sequence, the last one what
    is left."""
    part = part_of(d, cu_seqlens, lambda length: cdiv(length, c.block_q), d.blocks)
    first_key = cu_seqlens_k[part.sequence]
    keys = cu_seqlens_k[part.following] - first_key

    @loop(cdiv(part.count, BLOCK), label="rows")
    def _(i):
        rows = span(part.before + i * BLOCK, BLOCK, end=part.before + part.count)
        within = (arange(BLOCK) + i * BLOCK) * c.block_q
        diagonal = within + (keys - (part.end - part.begin))
        all_keys = zeros((BLOCK,), i32) + keys
        seen = maximum(minimum(diagonal + c.block_q, keys), 0) if c.causal else all_keys
        row = (
            within + part.begin,
            zeros((BLOCK,), i32) + part.end,
            zeros((BLOCK,), i32) + first_key,
            all_keys,
            diagonal,
        )
        for column, value in enumerate(row):
            found[rows, column] = where(part.real, value, 0)
        found[rows, SEEN] = where(part.real, seen, -1)


@kernel(grid=lambda d, c: (cdiv(d.blocks, BLOCK),))
def ordered(d, c, found=In("blocks 6", i32), block_table=Out("blocks 5", i32)):
    """The rows of `blocks`, those that see most keys first, else in order: a row's place is the number of rows before it."""
    first = program_id(0) * BLOCK
    own = span(first, BLOCK, end=d.blocks)
    seen, number = found[own, SEEN], arange(BLOCK) + first

    @loop(cdiv(d.blocks, OTHERS), init=zeros((BLOCK,), i32), label="others")
    def place(i, so_far):
        other, at = found[span(i * OTHERS, OTHERS, end=d.blocks), SEEN], arange(OTHERS) + i * OTHERS
        ahead = (other[None, :] > seen[:, None]) | ((other[None, :] == seen[:, None]) & (at[None, :] < number[:, None]))
        return so_far + (ahead & (at < d.blocks)[None, :]).to(i32).sum(1)

    for column in range(SEEN):
        block_table.store(place, column, value=found[own, column], mask=number < d.blocks)
