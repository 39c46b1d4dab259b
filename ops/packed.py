"""Packed sequences: what kernels work out about them on the device, from cu_seqlens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from k3dsl.language import arange, assume, cdiv, i32, loop, minimum, program_id, span, where, zeros

BLOCK = 256
"""Sequences that a program counts at a time."""


def counted(cu_seqlens: Any, sequence: Any, count: Callable[[Any], Any]) -> Any:
    """Within a kernel: the sum of `count` of the lengths of all sequences before this one, int32."""

    @loop(cdiv(sequence, BLOCK), init=zeros((BLOCK,), i32), label="sequences")
    def total(i, so_far):
        start, end = (
            cu_seqlens[span(i * BLOCK, BLOCK, end=sequence)],
            cu_seqlens[span(i * BLOCK + 1, BLOCK, end=sequence + 1)],
        )
        mine = arange(BLOCK) + i * BLOCK < sequence
        return so_far + where(mine, count((end - start).to(i32)), 0)

    return assume(total.sum(0), min=0)


class Part(NamedTuple):
    """What the program of one sequence writes of a table: `count` rows from row `before`. begin, end: of the sequence's tokens;
    following: the number of the sequence after it, at most N. real: False for the program of the rows that are left."""

    sequence: Any
    following: Any
    real: Any
    begin: Any
    end: Any
    before: Any
    count: Any


def part_of(d: Any, cu_seqlens: Any, count: Callable[[Any], Any], bound: Any) -> Part:
    """Within a kernel of N + 1 programs: the part of this one in a table of `bound` rows, `count` of a length a sequence."""
    sequence = program_id(0)
    before = counted(cu_seqlens, sequence, count)
    real, following = sequence < d.N, minimum(sequence + 1, d.N)
    begin, end = cu_seqlens[sequence].to(i32), cu_seqlens[following].to(i32)
    return Part(sequence, following, real, begin, end, before, where(real, count(end - begin), bound - before))
