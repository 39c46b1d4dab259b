"""Packed sequences: what kernels work out about them on the device, from cu_seqlens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3dsl.language import arange, assume, cdiv, i32, loop, span, where, zeros

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
