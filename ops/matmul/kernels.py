"""Matrix product: o = a b, one block of o a program, summed over K in fp32."""

from __future__ import annotations

from k3dsl.language import In, Out, cdiv, dot, f32, kernel, loop, program_id, span, when, zeros


@kernel(grid=lambda d, c: (c.group, cdiv(d.N, c.block_n), cdiv(d.M, c.block_m * c.group)))
def matmul(d, c, a=In("M K"), b=In("K N"), o=Out("M N")):
    """Any M, N and K. The first grid axis runs fastest, so `group` row blocks share each column block of b while it is in
    the L2 cache."""
    block = program_id(2) * c.group + program_id(0)
    rows = span(block * c.block_m, c.block_m, end=d.M)
    cols = span(program_id(1) * c.block_n, c.block_n, end=d.N)

    def write_block() -> None:
        @loop(cdiv(d.K, c.block_k), init=zeros((c.block_m, c.block_n), f32), label="k")
        def product(i, acc):
            inner = span(i * c.block_k, c.block_k, end=d.K)
            return dot(a[rows, inner], b[inner, cols], acc=acc, precision=c.precision)

        o[rows, cols] = product.to(o.dtype)

    if c.group == 1:
        write_block()
    else:
        when(block * c.block_m < d.M)(write_block)  # the last group may have row blocks to spare
