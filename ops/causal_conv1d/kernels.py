"""Depthwise causal convolution: whole sequences, their last inputs, and a few tokens of every request with state in place.

y_t = silu(bias + sum_j w[:, j] x_{t - (W - 1) + j}), so the last tap meets the current token. What lies before a sequence is
its initial state, the W - 1 inputs before it, or 0.
"""

from __future__ import annotations

from k3dsl.language import (
    In,
    InOut,
    Out,
    arange,
    assume,
    cdiv,
    f32,
    i32,
    kernel,
    loop,
    maximum,
    minimum,
    program_id,
    scalar,
    sigmoid,
    span,
    when,
    where,
    zeros,
)


def activated(c, y):
    """SiLU, or nothing."""
    return y * sigmoid(y, approx=c.approx) if c.activation else y


def taps_of(weight, bias, cols, width):
    """The taps of a block of channels and its bias (None without one), fp32. One wide read: a tap alone has a stride."""
    taps = weight[cols, :].to(f32)
    return [taps.select(1, j) for j in range(width)], None if bias is None else bias[cols].to(f32)


def convolved(taps, bias, inputs):
    """bias + sum of taps times inputs, in fp32; the oldest input first."""
    y = bias
    for w, x in zip(taps, inputs, strict=True):
        y = w * x.to(f32) if y is None else y + w * x.to(f32)
    return y


TOKENS, ENDS = 128, 64
"""Tokens that a program of `sequences` places, and the ends that it compares them with at a time."""


@kernel(grid=lambda d, c: (cdiv(d.T, TOKENS),))
def sequences(d, c, cu_seqlens=In("N+1"), sequence=Out("T", i32)):
    """The number of the sequence that each token belongs to: how many end before it. N for a token past the last."""
    first = program_id(0) * TOKENS
    token = arange(TOKENS) + first

    @loop(cdiv(d.N, ENDS), init=zeros((TOKENS,), i32), label="ends")
    def ended(i, so_far):
        ends = cu_seqlens[span(i * ENDS + 1, ENDS, end=d.N + 1)].to(i32)
        there = arange(ENDS) + i * ENDS < d.N
        return so_far + (there[None, :] & (ends[None, :] <= token[:, None])).to(i32).sum(1)

    sequence[span(first, TOKENS, end=d.T)] = ended


@kernel(grid=lambda d, c: (cdiv(d.P, c.block_p) * cdiv(d.T, c.rows * c.steps), d.B))
def causal_conv1d(
    d, c,
    x=In("B T P"), weight=In("P W"), bias=In("P", optional=True), initial_state=In("N W-1 P", optional=True),
    sequence=In("T", i32, optional=True), cu_seqlens=In("N+1", optional=True),
    y=Out("B T P"),
):  # fmt: skip
    """`rows` times `steps` tokens of some channels. A thread holds neighbouring channels of every token, so the inputs that
    taps share pass from token to token in registers; only the W - 1 before the first are read twice."""
    S, blocks = d.W - 1, cdiv(d.P, c.block_p)
    batch = program_id(1)
    cols = span(program_id(0) % blocks * c.block_p, c.block_p, end=d.P)
    first = program_id(0) // blocks * (c.rows * c.steps)
    taps, offset = taps_of(weight, bias, cols, d.W)

    # inputs stay in their own dtype, half the registers of fp32, but beside an fp32 state
    held = x.dtype if initial_state is None else initial_state.dtype
    before = []
    for i in range(S):
        t = first + (i - S)
        older = x.load(batch, maximum(t, 0), cols, mask=t >= 0).to(held)
        if initial_state is not None and sequence is None:
            given = initial_state.load(batch, minimum(first + i, S - 1), cols, mask=t < 0)
            older = where(t >= 0, older, given)
        before.append(older)

    def tokens(start, window):
        """The outputs of `rows` tokens; returns the inputs that the next ones need."""
        news = [x.load(batch, start + r, cols, mask=start + r < d.T).to(held) for r in range(c.rows)]
        seen = [*window, *news]
        for r in range(c.rows):
            inputs, t = seen[r : r + d.W], start + r
            if sequence is not None:
                inputs, real = within(d, c, inputs, t, initial_state, sequence, cu_seqlens, cols)
            out = activated(c, convolved(taps, offset, inputs))
            if sequence is not None:
                out = where(real, out, 0.0)
            y.store(batch, t, cols, value=out.to(y.dtype), mask=t < d.T)
        return tuple(seen[c.rows :])

    if c.steps == 1:
        tokens(first, before)
        return

    @loop(minimum(c.steps, cdiv(d.T - first, c.rows)), init=tuple(before), label="tokens")
    def _(i, *window):
        return tokens(first + i * c.rows, window)


def within(d, c, inputs, t, initial_state, sequence, cu_seqlens, cols):
    """The inputs of token t with those of another sequence replaced, and whether t belongs to a sequence at all."""
    S = d.W - 1
    number = sequence.load(t, mask=t < d.T)
    n = minimum(number, d.N - 1)
    begin = cu_seqlens[n].to(i32)
    chosen = []
    for j, own in enumerate(inputs[:S]):
        place = t - (S - j) - begin  # within the sequence
        other = 0.0
        if initial_state is not None:
            row = minimum(maximum(place + S, 0), S - 1)
            other = initial_state.load(n, row, cols, mask=(place < 0) & (t < d.T))
        chosen.append(where(place >= 0, own, other))
    return [*chosen, inputs[S]], number < d.N


@kernel(grid=lambda d, c: (cdiv(d.P, c.block_p), d.N))
def final_window(
    d, c,
    x=In("B T P"), initial_state=In("N W-1 P", optional=True), cu_seqlens=In("N+1", optional=True),
    final_state=Out("N W-1 P"),
):  # fmt: skip
    """The last W - 1 inputs of every sequence; a shorter one keeps the younger part of its initial state before them."""
    n, S = program_id(1), d.W - 1
    cols = span(program_id(0) * c.block_p, c.block_p, end=d.P)
    batch, begin, length = n, scalar(0), scalar(d.T)
    if cu_seqlens is not None:
        begin = cu_seqlens[n].to(i32)
        batch, length = scalar(0), cu_seqlens[n + 1].to(i32) - begin
    for i in range(S):
        place = length + (i - S)
        last = x.load(batch, begin + maximum(place, 0), cols, mask=place >= 0).to(final_state.dtype)
        if initial_state is not None:
            row = minimum(maximum(place + S, 0), S - 1)
            older = initial_state.load(n, row, cols, mask=place < 0).to(final_state.dtype)
            last = where(place < 0, older, last)
        final_state[n, i, cols] = last


@kernel(grid=lambda d, c: (cdiv(d.P, c.block_p), d.B))
def conv_update(
    d, c,
    x=In("B T P"), weight=In("P W"), bias=In("P", optional=True), slots=In("B", i32, optional=True),
    conv_state=InOut("pool W-1 P"), y=Out("B T P"),
):  # fmt: skip
    """T tokens, T static, of some channels of one request; the window at its slot moves on.

    A negative slot is padding: its output is 0 and no window is touched."""
    batch, S = program_id(1), d.W - 1
    cols = span(program_id(0) * c.block_p, c.block_p, end=d.P)

    def tokens(slot):
        taps, offset = taps_of(weight, bias, cols, d.W)
        seen = [conv_state[slot, i, cols] for i in range(S)] + [x[batch, t, cols] for t in range(d.T)]
        for t in range(d.T):
            y[batch, t, cols] = activated(c, convolved(taps, offset, seen[t : t + d.W])).to(y.dtype)
        for i in range(S):
            conv_state[slot, i, cols] = seen[d.T + i].to(conv_state.dtype)

    if slots is None:
        tokens(batch)
        return
    slot = slots[batch]

    @when(slot >= 0)
    def _():
        tokens(assume(slot, min=0))

    @when(slot < 0)
    def _():
        for t in range(d.T):
            y[batch, t, cols] = zeros((c.block_p,), y.dtype)
