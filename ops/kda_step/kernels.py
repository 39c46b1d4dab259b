"""One KDA decode step: short convolution, SiLU, gate, l2 norm, state update, gated RMSNorm; and the commit of kept states.

Per head and token, on S^T [V, K] in fp32 (Kimi Linear, arXiv 2510.26692, sections 3 and 4):
    q, k, v = silu(conv(.))    q <- scale q / |q|    k <- k / |k|    b = sigmoid(beta)
    S <- diag(2^gate) S    u = b (v - S^T k)    S <- S + k u^T    o = S^T q
    y = o / sqrt(mean(o^2) + eps) * norm_weight * sigmoid(output_gate)
"""

from __future__ import annotations

from k3dsl.language import (
    In,
    InOut,
    Out,
    assume,
    cdiv,
    exp2,
    f32,
    i32,
    kernel,
    loop,
    minimum,
    program_id,
    span,
    when,
    zeros,
)
from k3dsl.ops.causal_conv1d.kernels import activated, convolved
from k3dsl.ops.gated_rmsnorm.kernels import gated
from k3dsl.ops.kda.kernels import log2_gate, norm_scale, write_strength


@kernel(grid=lambda d, c: (d.H, d.B))
def kda_step(
    d, c,
    q=In("B T H K"), k=In("B T H K"), v=In("B T H V"), g=In("B T H K"), beta=In("B T H"), output_gate=In("B T H V"),
    conv_weight=In("2*H*K+H*V W"), A_log=In("H", f32), dt_bias=In("H K", f32, optional=True), norm_weight=In("V", f32),
    slots=In("B", i32, optional=True), state=InOut("pool H SA SB"), conv_state=InOut("pool W-1 2*H*K+H*V"),
    o=Out("B T H V"),
):  # fmt: skip
    """One head of one request, T static tokens. State and window are updated in place at the request's slot.

    A negative slot is padding: its output is 0 and no slot is touched."""
    inputs = (q, k, v, g, beta, output_gate, conv_weight, A_log, dt_bias, norm_weight)
    guarded(d, c, inputs, slots, state, conv_state, o, None, None)


@kernel(grid=lambda d, c: (d.H, d.B), name="kda_step")
def kda_step_kept(
    d, c,
    q=In("B T H K"), k=In("B T H K"), v=In("B T H V"), g=In("B T H K"), beta=In("B T H"), output_gate=In("B T H V"),
    conv_weight=In("2*H*K+H*V W"), A_log=In("H", f32), dt_bias=In("H K", f32, optional=True), norm_weight=In("V", f32),
    slots=In("B", i32, optional=True), state=In("pool H SA SB"), conv_state=In("pool W-1 2*H*K+H*V"),
    o=Out("B T H V"), states=Out("B T H SA SB"), windows=Out("B T W-1 2*H*K+H*V"),
):  # fmt: skip
    """As kda_step, but the pools stay as they are and what they would hold after each token is written out."""
    inputs = (q, k, v, g, beta, output_gate, conv_weight, A_log, dt_bias, norm_weight)
    guarded(d, c, inputs, slots, state, conv_state, o, states, windows)


def guarded(d, c, inputs, slots, state, conv_state, o, states, windows):
    """The tokens of a request that has a slot; zeros for one that has none."""
    head, batch = program_id(0), program_id(1)
    if slots is None:
        tokens(d, c, inputs, state, conv_state, o, states, windows, head, batch, batch)
        return
    slot = slots[batch]

    @when(slot >= 0)
    def _():
        tokens(d, c, inputs, state, conv_state, o, states, windows, head, batch, assume(slot, min=0))

    @when(slot < 0)
    def _():
        for t in range(d.T):
            o[batch, t, head] = zeros((d.V,), o.dtype)


def tokens(d, c, inputs, state, conv_state, o, states, windows, head, batch, slot):
    """Carries the state and the windows over the tokens. The state is read first: it takes the longest."""
    q, k, v, g, beta, output_gate, conv_weight, A_log, dt_bias, norm_weight = inputs
    S = d.W - 1
    s0 = (state[slot, head] if c.v_first else state[slot, head].T).to(f32)
    channels = [
        span(head * d.K, d.K),
        span(d.H * d.K + head * d.K, d.K),
        span(2 * d.H * d.K + head * d.V, d.V),
    ]
    before = [conv_state[slot, i, cols] for cols in channels for i in range(S)]
    # tap by tap: the layout of a two-dimensional read would spread to the state and double its registers
    taps = [[conv_weight[cols, j].to(f32) for j in range(d.W)] for cols in channels]

    def token(t, s, *seen):
        """One token; returns the state and the windows after it."""

        def gates():
            decay = exp2(log2_gate(c, g[batch, t, head], head, span(0, d.K), A_log, dt_bias), bound=0.0)
            return decay, write_strength(c, beta[batch, t, head])

        def output_factors():
            return norm_weight[:], output_gate[batch, t, head].to(f32)

        # all reads first: none waits for the sums, which end in barriers. Of several tokens the registers do not allow it
        early = (gates(), output_factors()) if d.T == 1 else (None, None)
        rows = [[*seen[n * S : (n + 1) * S], x[batch, t, head].to(conv_state.dtype)] for n, x in enumerate((q, k, v))]
        qf, kf, vf = (activated(c, convolved(w, None, row)) for w, row in zip(taps, rows, strict=True))
        qf, kf = qf * norm_scale(c, qf, 0, c.scale), kf * norm_scale(c, kf, 0, 1.0)
        decay, b = early[0] or gates()
        s = s * decay[None, :]
        u = (vf - (s * kf[None, :]).sum(1)) * b
        s = s + u[:, None] * kf[None, :]
        weight, gate = early[1] or output_factors()
        y = gated((s * qf[None, :]).sum(1), weight, gate, c.eps, c.silu, c.approx)
        o[batch, t, head] = y.to(o.dtype)
        # rounded at every token, so that several tokens give what one at a time give
        rounded = s.to(state.dtype)
        after = [row[i + 1] for row in rows for i in range(S)]
        if states is not None:
            states[batch, t, head] = rounded if c.v_first else rounded.T
            store_windows(windows, (batch, t), channels, after)
        return rounded.to(f32), *after

    if d.T == 1:
        last = token(0, s0, *before)
    else:

        @loop(d.T, init=(s0, *before), label="tokens")
        def last(t, s, *seen):
            return token(t, s, *seen)

    if states is None:
        s = last[0].to(state.dtype)
        state[slot, head] = s if c.v_first else s.T
        store_windows(conv_state, (slot,), channels, last[1:])


def store_windows(target, place, channels, rows):
    """Writes the windows of q, k and v, oldest input first."""
    S = len(rows) // len(channels)
    for n, cols in enumerate(channels):
        for i in range(S):
            target.store(*place, i, cols, value=rows[n * S + i])


@kernel(grid=lambda d, c: (cdiv(d.E, c.block), d.B))
def kda_commit(
    d, c,
    kept=In("B T E"), num_accepted=In("B", i32), slots=In("B", i32, optional=True), pool=InOut("size E"),
):  # fmt: skip
    """pool[slots[b]] = kept[b, num_accepted[b] - 1]. No token accepted, or a negative slot: nothing is written."""
    batch = program_id(1)
    cols = span(program_id(0) * c.block, c.block, end=d.E)
    accepted = minimum(num_accepted[batch], d.T)
    slot = batch if slots is None else slots[batch]

    @when((accepted > 0) & (slot >= 0))
    def _():
        pool[assume(slot, min=0), cols] = kept[batch, assume(accepted - 1, min=0), cols]
