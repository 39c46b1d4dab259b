"""Handwritten TileLang modules for tests of building and launching: an addition with a runtime length, a product."""

from __future__ import annotations

from k3dsl.backends.base import Arg, Source

ADD = """import tilelang.language as T


def add():
    m = T.dynamic("m")

    @T.prim_func
    def add(
        x: T.Tensor((m,), "float32"),
        y: T.Tensor((m,), "float32"),
        z: T.Tensor((m,), "float32"),
        unused: T.int32,
        n: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, 256), threads=128) as (bx,):
            for i in T.Parallel(256):
                if bx * 256 + i < n:
                    z[bx * 256 + i] = x[bx * 256 + i] + y[bx * 256 + i] * scale

    return add
"""

GEMM = """import tilelang.language as T


def gemm():
    m = T.dynamic("m")

    @T.prim_func
    def gemm(
        a: T.Tensor((m, 1024), "bfloat16"),
        b: T.Tensor((1024, 512), "bfloat16"),
        c: T.Tensor((m, 512), "bfloat16"),
        rows: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, 128), 4, threads=128) as (i, j):
            x = T.alloc_shared((128, 64), "bfloat16")
            y = T.alloc_shared((64, 128), "bfloat16")
            acc = T.alloc_fragment((128, 128), "float32")
            T.clear(acc)
            for k in T.Pipelined(16, num_stages=STAGES):
                T.copy(a[i * 128, k * 64], x)
                T.copy(b[k * 64, j * 128], y)
                T.gemm(x, y, acc)
            T.copy(acc, c[i * 128, j * 128])

    return gemm
"""


def pointer(name: str, dtype: str) -> Arg:
    return Arg(name, "pointer", dtype, 16, name)


def dim(name: str) -> Arg:
    return Arg(name, "dim", "i32", 1, name)


def add_source(text: str = ADD, **pass_configs: object) -> Source:
    """z = x + scale * y for the first n elements. `unused` is a parameter that TileLang drops."""
    tensors = [pointer(name, "f32") for name in "xyz"]
    args = (*tensors, dim("unused"), dim("n"), Arg("scale", "scalar", "f32", 1, "scale"))
    return Source("tilelang", "add", text, args, {"threads": 128, "pass_configs": pass_configs})


def gemm_source(stages: int = 3, **pass_configs: object) -> Source:
    """c = a @ b for a [m, 1024] and b [1024, 512]; rows is m."""
    tensors = [pointer(name, "bf16") for name in "abc"]
    text = GEMM.replace("STAGES", str(stages))
    return Source("tilelang", "gemm", text, (*tensors, dim("rows")), {"threads": 128, "pass_configs": pass_configs})
