"""Gated RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate) over the width of each head, rounded once."""

from __future__ import annotations

from k3dsl.language import In, Out, cdiv, f32, kernel, program_id, rsqrt, sigmoid, span


def positions(start, size, end):
    """Some rows of an axis; one row alone is a position, so that the axis goes away."""
    return start if size == 1 else span(start * size, size, end=end)


def gated(x, weight, gate, eps, silu, approx):
    """The norm over the last axis times the gate, all fp32."""
    axis = len(x.shape) - 1
    r = rsqrt((x * x).sum(axis, keepdim=len(x.shape) > 1) / x.shape[-1] + eps)
    opened = sigmoid(gate, approx=approx)
    return x * r * weight * (gate * opened if silu else opened)


@kernel(grid=lambda d, c: (cdiv(d.N, c.tokens), cdiv(d.H, c.heads)))
def gated_rmsnorm(d, c, x=In("N H D"), gate=In("N H D"), weight=In("D"), y=Out("N H D")):
    """`heads` heads of `tokens` tokens a program. D is static and need not be a power of two."""
    tokens, heads = positions(program_id(0), c.tokens, d.N), positions(program_id(1), c.heads, d.H)
    xf, gf = x[tokens, heads].to(f32), gate[tokens, heads].to(f32)
    y[tokens, heads] = gated(xf, weight[:].to(f32), gf, c.eps, c.silu, c.approx).to(y.dtype)
