"""RMSNorm in Llama's form: y = (x / sqrt(mean(x^2) + eps)), rounded to x's dtype, times the weight."""

from __future__ import annotations

from k3dsl.language import In, Out, cdiv, f32, kernel, program_id, rsqrt, span


@kernel(grid=lambda d, c: (cdiv(d.R, c.rows),))
def rmsnorm(d, c, x=In("R D"), weight=In("D"), y=Out("R D")):
    """`rows` whole rows a program. D is static and need not be a power of two."""
    rows = span(program_id(0) * c.rows, c.rows, end=d.R)
    xf = x[rows, :].to(f32)
    r = rsqrt((xf * xf).sum(1, keepdim=True) / d.D + c.eps)
    normed = (xf * r).to(x.dtype)
    y[rows, :] = (normed.to(f32) * weight[:].to(f32)).to(y.dtype)
