"""The KDA kernel for one token of every sequence.

Mathematics: Kimi Linear report (arXiv 2510.26692), section 3. Per head, with the log2 gate G:
    S <- diag(2^G) S    u = beta (v - S^T k)    S <- S + k u^T    o = S^T q
"""

from __future__ import annotations

from k3dsl.language import In, InOut, Out, assume, exp2, f32, i32, kernel, program_id, span, when, zeros
from k3dsl.ops.kda.kernels import initial_rows, log2_gate, norm_scale, store_state, write_strength


@kernel(grid=lambda d, c: (d.V // c.BV, d.H, d.B))
def decode(
    d, c,
    q=In("B HK K"), k=In("B HK K"), v=In("B H V"), g=In("B H K"), beta=In("B H"),
    A_log=In("H", f32, optional=True), dt_bias=In("H K", f32, optional=True),
    state_indices=In("B", i32, optional=True), state=InOut("slots H SA SB"),
    o=Out("B H V"), new_state=Out("B H SA SB", optional=True),
):  # fmt: skip
    """One token of every sequence. The state is updated in place at its slot, or written to new_state.

    A negative slot is padding: its output is 0 and no state is touched."""
    block, head, batch = program_id(0), program_id(1), program_id(2)
    cols = span(block * c.BV, c.BV)
    if state_indices is None:
        step(d, c, q, k, v, g, beta, A_log, dt_bias, state, o, new_state, block, head, batch, batch)
        return
    slot = state_indices[batch]

    @when(slot >= 0)
    def _():
        step(d, c, q, k, v, g, beta, A_log, dt_bias, state, o, new_state, block, head, batch, assume(slot, min=0))

    @when(slot < 0)
    def _():
        o[batch, head, cols] = zeros((c.BV,), o.dtype)


def step(d, c, q, k, v, g, beta, A_log, dt_bias, state, o, new_state, block, head, batch, slot):
    """S <- diag(2^gate) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, on S^T [BV, K] in fp32."""
    cols = span(block * c.BV, c.BV)
    key_head = head // (d.H // d.HK)
    # all reads first: none waits for the sums, which end in barriers
    s = initial_rows(c, state, slot, head, cols)
    kf, qf, vf = k[batch, key_head].to(f32), q[batch, key_head].to(f32), v[batch, head, cols].to(f32)
    decay = exp2(log2_gate(c, g[batch, head], head, span(0, d.K), A_log, dt_bias), bound=0.0)
    b = write_strength(c, beta[batch, head])
    kf, qf = kf * norm_scale(c, kf, 0, 1.0), qf * norm_scale(c, qf, 0, c.scale)
    s = s * decay[None, :]
    u = (vf - (s * kf[None, :]).sum(1)) * b
    s = s + u[:, None] * kf[None, :]
    o[batch, head, cols] = (s * qf[None, :]).sum(1).to(o.dtype)
    target, index = (state, slot) if new_state is None else (new_state, batch)
    store_state(c, target, s, block, head, index)
