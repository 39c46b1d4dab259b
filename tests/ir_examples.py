"""Hand-written kernels that tests share: the chunk scan of KDA, one with every op of the language, one with any body."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from k3dsl import language as lang
from k3dsl.ir.graph import Kernel
from k3dsl.ir.symbols import cdiv
from k3dsl.language import (
    In,
    InOut,
    Out,
    Scalar,
    Sym,
    TensorSpec,
    arange,
    bf16,
    dot,
    exp2,
    f16,
    f32,
    i32,
    i64,
    kernel,
    loop,
    maximum,
    minimum,
    program_id,
    span,
    u8,
    when,
    where,
    zeros,
)


@kernel(grid=lambda d, c: (d.H, d.V // c.BV))
def chunk_scan(
    d, c,
    w=In("n H C K"), kg=In("n H C K"), qg=In("n H C K"), x=In("n H C C"), v=In("T H V"), aqk=In("n H C C"),
    decay=In("n H K", f32), o=Out("T H V"), final_state=Out("H V K", f32),
):  # fmt: skip
    """Carries the state over chunks."""
    head, block = program_id(0), program_id(1)
    cols = span(block * c.BV, c.BV)

    @loop(d.n, init=zeros((c.BV, d.K), f32), label="chunks")
    def state(i, s):
        rows = span(i * c.C, c.C, end=d.T)
        sb = s.to(bf16)
        r = dot(v[rows, head, cols].T, x[i, head].T) - dot(sb, w[i, head].T)
        rb = r.to(bf16)
        o[rows, head, cols] = (dot(sb, qg[i, head].T) + dot(rb, aqk[i, head].T)).T.to(bf16)
        return dot(rb, kg[i, head], acc=s * decay[i, head])

    final_state[head, cols, :] = state


def traced_scan(chunk: int = 32, divisible_by: int = 64) -> Kernel:
    """The chunk scan at H=4, K=V=128 for any T with the given divisor."""
    tokens = Sym("T", divisible_by=divisible_by)
    dims = {"T": tokens, "H": 4, "K": 128, "V": 128, "n": cdiv(tokens, chunk)}
    return chunk_scan.trace(dims, {"C": chunk, "BV": 64}, dict.fromkeys(("w", "kg", "qg", "x", "v", "aqk", "o"), bf16))


@kernel(grid=lambda d, c: (d.T // 16, 4, 2))
def every_op(
    d, c, x=In("T 16", f32), table=In("T*2", i32), strided=In("T 8", bf16), codes=In("16 16", u8), powers=In("16 1", u8),
    o=Out("T 16", f32), acc=InOut("T", f32), scale=Scalar(f32), offset=Scalar(i32),
):  # fmt: skip
    """Uses each opcode at least once, and each form of an index."""
    block = program_id(0) + program_id(1) * 0 + program_id(2) * 0
    rows = span(block * 16, 16, end=d.T)
    tile = x.load(rows, span(0, 16).reshape(2, 8), other=1.0, contiguity=2, order=(0, 1, 2)).reshape(16, 16)
    y = lang.exp(minimum(tile, 0.0)) + exp2(tile, bound=64) - lang.log(tile) * lang.log2(tile, approx=True)
    y = lang.log1p(y) / lang.sqrt(y) + lang.rsqrt(y, approx=True) + lang.tanh(-y) + lang.sigmoid(abs(y))
    y = lang.softplus(y) + lang.reciprocal(y) + lang.sin(y) + lang.cos(y) + lang.erf(y) + lang.floor(y) + lang.ceil(y)
    y = where((y < 1.0) & ((y <= 2.0) | (y > 3.0)) & ((y >= 4.0) ^ (y == 5.0)) & ~(y != 6.0), maximum(y, 0.0), scale)
    count = (arange(16, start=offset) // 3 % 5 << 1) >> 1
    known = lang.assume(table[block,], divisible_by=8, min=0, max=64)
    gathered = strided[minimum(arange(16), known), 0].to(f32)
    y = y + y.sum(0) + y.max(1)[:, None] + y.min(0, keepdim=True) + y.prod(1, keepdim=True) + gathered[:, None]
    y = y + where((y > 0.0).any(1) & (y > 1.0).all(1), 1.0, 0.0)[:, None] + count.to(f32)
    y = y + (lang.argmax(y, 1) + lang.argmin(y, 0, keepdim=True).reshape(16)).to(f32)[:, None]
    total, most = lang.reduce((y, y), 1, lambda a, m, b, n: (a + b, maximum(m, n)))
    prefix, _ = lang.scan((y, y), 0, lambda a, m, b, n: (a * n + b, m * n), reverse=True)
    y = y + lang.cumsum(y, 1) + lang.cumprod(y, 0) + lang.cummax(y, 0) + lang.cummin(y, 0, reverse=True) + prefix
    y = dot(lang.unit_lower_inverse(y, method="substitution"), y.T, acc=y + total[:, None], precision="tf32")
    y = y + y.select(1, 3)[:, None] + most[:, None]
    y = y + lang.dequantize_mxfp4(codes[:], powers[:]).to(f32).reshape(16, 2, 16).select(1, 0)

    @loop(block, start=1, init=(y, y), step=2, label="two words", reverse=True)
    def pair(i, a, b):
        return b, a + i.to(f32)

    @loop(3)
    def effects(i):
        @when(i < block)
        def inner():
            acc.atomic_add(rows, value=pair[0].sum(1), mask=pair[0].sum(1) > 0.0)

    o[rows] = pair[1]


def traced_every_op() -> Kernel:
    """every_op with a strided tensor whose row stride is a runtime dim."""
    stride = Sym("row_stride", divisible_by=8, max=4096)
    return every_op.trace({"T": Sym("T", divisible_by=16, min=16)}, {}, {"strided": TensorSpec(bf16, (stride, 1))})


Body = Callable[..., Any]


def trace_body(body: Body, dims: dict[str, Any] | None = None, **knobs: Any) -> Kernel:
    """Traces body(d, c, x, o, e): x [T, 16] and o [T, 16] in f32, and `e` with tensors of other dtypes."""

    @kernel(grid=lambda d, c: (4,))
    def k(
        d, c,
        x=In("T 16", f32), half=In("16", f16), brain=In("16", bf16), ids=In("T", i32), wide=In("T", i64),
        both=InOut("T", f32), o=Out("T 16", f32), scale=Scalar(f32), extra=In("T", f32, optional=True),
    ):  # fmt: skip
        e = SimpleNamespace(half=half, brain=brain, ids=ids, wide=wide, both=both, scale=scale, extra=extra)
        return body(d, c, x, o, e)

    return k.trace(dims or {"T": Sym("T", divisible_by=16), "K": 16}, {"BV": 4, **knobs})
