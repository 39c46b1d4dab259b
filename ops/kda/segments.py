"""The kernels of the segmented scan: segments of a sequence carry their states at the same time.

A chunk is an affine map of the state, S^T <- S^T (diag(decay) - w^T kg) + (X v)^T kg (Kimi Linear report, arXiv 2510.26692,
the chunkwise form), and so is a segment, a fixed number of chunks: S^T <- S^T M + E. `ends` gives E, a segment's end from
the zero state, `transitions` gives M (`maps` both in one launch), `fold` the state that comes into each segment, and
`segment_scan` runs the ordinary scan from there. All states are kept as S^T [V, K] in fp32, so that M [K, K] multiplies
from the right and its rows are carried over the chunks like those of a state. The first segment starts from the initial
state itself, so its end needs no M; the last segment's map is needed by nobody.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from k3dsl.language import (
    In,
    InOut,
    Out,
    arange,
    assume,
    cdiv,
    dot,
    f32,
    i32,
    kernel,
    loop,
    maximum,
    minimum,
    ones,
    program_id,
    scalar,
    span,
    when,
    where,
    zeros,
)
from k3dsl.ops.kda.kernels import OVERFLOW, SMALLEST, initial_rows, over_chunks, store_state

FOLD_ROWS = 16
"""Value columns of a state that one program of the fold carries."""
FAINT = 2.0**-100
"""Below this a row of M is scaled up step by step, so that the scale's reciprocal stays finite."""


class Segment(NamedTuple):
    """Where one segment lies. number, of: among those of its sequence. chunks and rows count from the tensors' start."""

    sequence: Any
    number: Any
    of: Any
    batch: Any
    chunk: Any
    trips: Any
    begin: Any
    end: Any


def segment(d: Any, c: Any, index: Any, cu_seqlens: Any, chunk_offsets: Any, segment_table: Any) -> Segment:
    """The segment of that index. A spare one, of no sequence or past its sequence's end, has no trips and is never the last.

    A sequence has at least one segment, so that an empty one has a final state."""
    if c.varlen:
        real = segment_table[index, 0] >= 0
        sequence = assume(maximum(segment_table[index, 0], 0), min=0)
        number = assume(segment_table[index, 1], min=0)
        row, end = cu_seqlens[sequence].to(i32), cu_seqlens[sequence + 1].to(i32)
        batch, chunk, chunks = 0, chunk_offsets[sequence], cdiv(end - row, c.C)
    else:
        sequence, number = index // c.segments, index % c.segments
        batch, chunk, chunks = sequence, 0, d.chunks
        row, end = 0, d.T if c.tail else None
    skipped = number * d.segment_chunks
    trips = maximum(minimum(chunks - skipped, d.segment_chunks), 0)
    of = maximum(cdiv(chunks, d.segment_chunks), 1)
    if c.varlen:
        trips, of = where(real, trips, 0), where(real, of, 0)
    return Segment(sequence, number, of, batch, chunk + skipped, trips, row + skipped * c.C, end)


def is_in_sequence(s: Segment) -> Any:
    """False for a spare segment."""
    return s.number < s.of


def has_map(s: Segment) -> Any:
    """True for a segment whose end another one starts from."""
    return s.number + 1 < s.of


def flag(c: Any, state: Any, s0: Any, largest: Any) -> Any:
    """1 where fp16 could not hold a block's values, as in `scan`."""
    lost = (~(abs(state) < OVERFLOW)).any(1).any(0)
    seen = maximum(largest.max(1).max(0), abs(s0).max(1).max(0))
    return (lost | ((seen > 0.0) & (seen < SMALLEST))).to(i32)


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.segments))
def ends(
    d, c,
    v=In("B T H V"), w=In("B chunks H C K"), kg=In("B chunks H C K"), x=In("B chunks H C XC"), decay=In("B chunks H K", f32),
    initial_state=In("N H SA SB", optional=True), cu_seqlens=In("N+1", optional=True),
    chunk_offsets=In("N+1", i32, optional=True), segment_table=In("segments 2", i32, optional=True),
    segment_ends=Out("segments H V K", f32), end_out_of_range=Out("segments H V//BV", i32, optional=True),
):  # fmt: skip
    """A segment's end state from zero, E, or from the initial state for a sequence's first segment."""
    block, head, index = program_id(0), program_id(1), program_id(2)
    place = segment(d, c, index, cu_seqlens, chunk_offsets, segment_table)
    write_end(d, c, (v, w, kg, x, decay), initial_state, segment_ends, end_out_of_range, place, block, head, index)


def write_end(d, c, tensors, initial_state, segment_ends, end_out_of_range, place, block, head, index):
    """BV rows of E and their flag."""
    s0, state, largest = end_of(d, c, tensors, initial_state, place, block, head)

    @when(has_map(place))
    def _():
        segment_ends[index, head, span(block * c.BV, c.BV)] = state

    if end_out_of_range is not None:
        end_out_of_range[index, head, block] = where(has_map(place), flag(c, state, s0, largest), 0)


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.segments))
def ends_again(
    d, c,
    end_out_of_range=In("segments H V//BV", i32),
    v=In("B T H V"), w=In("B chunks H C K"), kg=In("B chunks H C K"), x=In("B chunks H C XC"), decay=In("B chunks H K", f32),
    initial_state=In("N H SA SB", optional=True), cu_seqlens=In("N+1", optional=True),
    chunk_offsets=In("N+1", i32, optional=True), segment_table=In("segments 2", i32, optional=True),
    segment_ends=InOut("segments H V K", f32),
):  # fmt: skip
    """Does the ends again, with tf32 products, that fp16 could not hold; for all others it ends at once."""
    block, head, index = program_id(0), program_id(1), program_id(2)

    @when(end_out_of_range[index, head, block] != 0)
    def _():
        place = segment(d, c, index, cu_seqlens, chunk_offsets, segment_table)
        _, state, _ = end_of(d, c, (v, w, kg, x, decay), initial_state, place, block, head)
        segment_ends[index, head, span(block * c.BV, c.BV)] = state


def end_of(d, c, tensors, initial_state, place, block, head):
    """The scan over a segment without outputs. Returns the state before and after, and the largest |R|."""
    v, w, kg, x, decay = tensors
    cols = span(block * c.BV, c.BV)
    s0 = zeros((c.BV, d.K), f32)
    if initial_state is not None:
        s0 = where(place.number == 0, initial_rows(c, initial_state, place.sequence, head, cols), 0.0)
    trips = where(has_map(place), place.trips, 0)
    factors = (w, kg, None, x, None, decay)
    state, largest = over_chunks(
        c, v, factors, None, s0, place.batch, head, cols, place.chunk, trips, place.begin, place.end
    )
    return s0, state, largest


@kernel(grid=lambda d, c: (d.K // c.BM, d.H, d.segments))
def transitions(
    d, c,
    w=In("B chunks H C K"), kg=In("B chunks H C K"), decay=In("B chunks H K", f32),
    cu_seqlens=In("N+1", optional=True), chunk_offsets=In("N+1", i32, optional=True),
    segment_table=In("segments 2", i32, optional=True),
    transition=Out("segments H K K", f32),
):  # fmt: skip
    """M of the segments between a sequence's first and last."""
    block, head, index = program_id(0), program_id(1), program_id(2)
    place = segment(d, c, index, cu_seqlens, chunk_offsets, segment_table)
    write_transition(d, c, (w, kg, decay), transition, place, block, head, index)


@kernel(grid=lambda d, c: (d.V // c.BV + d.K // c.BM, d.H, d.segments))
def maps(
    d, c,
    v=In("B T H V"), w=In("B chunks H C K"), kg=In("B chunks H C K"), x=In("B chunks H C XC"), decay=In("B chunks H K", f32),
    initial_state=In("N H SA SB", optional=True), cu_seqlens=In("N+1", optional=True),
    chunk_offsets=In("N+1", i32, optional=True), segment_table=In("segments 2", i32, optional=True),
    segment_ends=Out("segments H V K", f32), transition=Out("segments H K K", f32),
    end_out_of_range=Out("segments H V//BV", i32, optional=True),
):  # fmt: skip
    """`ends` and `transitions` in one launch: programs of a segment and head run side by side, so that w and kg, which all of
    them read, come from memory once."""
    part, head, index = program_id(0), program_id(1), program_id(2)
    place = segment(d, c, index, cu_seqlens, chunk_offsets, segment_table)
    blocks = d.V // c.BV

    @when(part < blocks)
    def _():
        block = minimum(part, blocks - 1)
        write_end(d, c, (v, w, kg, x, decay), initial_state, segment_ends, end_out_of_range, place, block, head, index)

    @when(part >= blocks)
    def _():
        write_transition(d, c, (w, kg, decay), transition, place, maximum(part - blocks, 0), head, index)


def write_transition(d, c, tensors, transition, place, block, head, index):
    """BM rows of M: rows of the identity, carried over the chunks.

    With fp16 factors a row is kept at size 1 and its scale apart, so that however far it has decayed it keeps fp16's
    precision: the state that it multiplies may be large."""
    w, kg, decay = tensors
    wanted = (place.number > 0) & has_map(place)
    operand = f32 if c.wide else w.dtype
    first = block * c.BM
    identity = where(arange(c.BM)[:, None] + first == arange(d.K)[None, :], 1.0, 0.0)
    init = (identity, ones((c.BM,), f32)) if c.scaled else (identity,)

    def product(a, b, acc=None):
        return dot(a, b, acc=acc, precision=c.scan_precision if a.dtype == f32 else None)

    @loop(where(wanted, place.trips, 0), init=init, label="chunks")
    def carried(i, m, scale=None):
        n = place.chunk + i
        w_n, kg_n = w[place.batch, n, head], kg[place.batch, n, head]
        decay_n = decay[place.batch, n, head]
        if c.scaled:
            top = maximum(abs(m).max(1), FAINT)
            scale = scale * top
            m = m * (1.0 / top)[:, None]
        r = -product(m.to(operand), w_n.to(operand).T)
        m = product(r.to(operand), kg_n.to(operand), acc=m * decay_n[None, :])
        return (m, scale) if c.scaled else m

    @when(wanted)
    def _():
        m = carried[0] * carried[1][:, None] if c.scaled else carried[0]
        transition[index, head, span(first, c.BM)] = m


@kernel(grid=lambda d, c: (d.V // FOLD_ROWS, d.H, d.N))
def fold(
    d, c,
    segment_ends=In("segments H V K", f32), transition=In("segments H K K", f32),
    initial_state=In("N H SA SB", optional=True), segment_offsets=In("N+1", i32, optional=True),
    incoming=Out("segments H V K", f32),
):  # fmt: skip
    """The state that comes into each segment of a sequence, from the ends and transitions of those before it."""
    block, head, sequence = program_id(0), program_id(1), program_id(2)
    cols = span(block * FOLD_ROWS, FOLD_ROWS)
    if c.varlen:
        first = segment_offsets[sequence]
        count = segment_offsets[sequence + 1] - segment_offsets[sequence]
    else:
        first = sequence * c.segments
        count = maximum(cdiv(d.chunks, d.segment_chunks), 1)
    s0 = zeros((FOLD_ROWS, d.K), f32)
    if initial_state is not None:
        s0 = initial_rows(c, initial_state, sequence, head, cols)
    incoming[first, head, cols] = s0

    @when(scalar(count) > 1)
    def _():
        second = segment_ends[first, head, cols]
        incoming[first + 1, head, cols] = second

        @loop(count - 1, init=second, start=1, label="segments")
        def _(j, s):
            n = first + j
            s = dot(s, transition[n, head], acc=segment_ends[n, head, cols], precision=c.fold_precision)
            incoming[n + 1, head, cols] = s
            return s


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.segments))
def segment_scan(
    d, c,
    v=In("B T H V"), w=In("B chunks H C K"), kg=In("B chunks H C K"), qg=In("B chunks H C K"),
    x=In("B chunks H C XC"), aqk=In("B chunks H C C"), decay=In("B chunks H K", f32),
    incoming=In("segments H V K", f32), cu_seqlens=In("N+1", optional=True),
    chunk_offsets=In("N+1", i32, optional=True), segment_table=In("segments 2", i32, optional=True),
    o=Out("B T H V"), final_state=Out("N H SA SB", optional=True),
    out_of_range=Out("segments H V//BV", i32, optional=True),
):  # fmt: skip
    """`scan` over one segment from the state that comes into it.

    out_of_range judges the segment alone: what overflows in it shows in its own end, and the segment after it starts from
    the fold's state, which took the ends that were done again."""
    block, head, index = program_id(0), program_id(1), program_id(2)
    place = segment(d, c, index, cu_seqlens, chunk_offsets, segment_table)
    factors = (w, kg, qg, x, aqk, decay)
    s0, state, largest = outputs_of(c, v, factors, incoming, o, final_state, place, block, head, index)
    if out_of_range is not None:
        out_of_range[index, head, block] = where(is_in_sequence(place), flag(c, state, s0, largest), 0)


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.segments))
def segment_rescan(
    d, c,
    out_of_range=In("segments H V//BV", i32),
    v=In("B T H V"), w=In("B chunks H C K"), kg=In("B chunks H C K"), qg=In("B chunks H C K"),
    x=In("B chunks H C XC"), aqk=In("B chunks H C C"), decay=In("B chunks H K", f32),
    incoming=In("segments H V K", f32), cu_seqlens=In("N+1", optional=True),
    chunk_offsets=In("N+1", i32, optional=True), segment_table=In("segments 2", i32, optional=True),
    o=InOut("B T H V"), final_state=InOut("N H SA SB", optional=True),
):  # fmt: skip
    """Does the blocks of segments again, with tf32 products, that fp16 could not hold; for all others it ends at once."""
    block, head, index = program_id(0), program_id(1), program_id(2)

    @when(out_of_range[index, head, block] != 0)
    def _():
        place = segment(d, c, index, cu_seqlens, chunk_offsets, segment_table)
        factors = (w, kg, qg, x, aqk, decay)
        outputs_of(c, v, factors, incoming, o, final_state, place, block, head, index)


def outputs_of(c, v, factors, incoming, o, final_state, place, block, head, index):
    """Writes a segment's outputs and, for a sequence's last one, the final state. Returns as `end_of` does."""
    cols = span(block * c.BV, c.BV)
    s0 = incoming[index, head, cols]
    state, largest = over_chunks(
        c, v, factors, o, s0, place.batch, head, cols, place.chunk, place.trips, place.begin, place.end
    )

    @when(place.number + 1 == place.of)
    def _():
        store_state(c, final_state, state, block, head, place.sequence)

    return s0, state, largest
