"""Calls of the small ops (matmul, softmax, rmsnorm, attention, segment_sum) on edge shapes, shared by CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3dsl import ops
from k3dsl.ops.attention import reference as attention_reference
from k3dsl.ops.matmul import reference as matmul_reference
from k3dsl.ops.rmsnorm import reference as rmsnorm_reference
from k3dsl.ops.segment_sum import reference as segment_reference
from k3dsl.ops.softmax import reference as softmax_reference
from k3dsl.runtime.op import Op

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 3e-3, F16: 4e-4, F32: 2e-6}
"""Relative RMS error that rounding a result (and, in attention and rmsnorm, a value before it) to a dtype may cost."""


@dataclass(frozen=True)
class Example:
    """run(device, seed) -> outputs, the same in float64, and the largest relative RMS error of each."""

    name: str
    run: Callable[[str, int], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], float]]


def drawn(op: Op, dims: Mapping[str, int], device: str, seed: int) -> dict[str, Any]:
    """Inputs of an op of the registry at these dims, those of a CPU for the rest."""
    assert op.inputs is not None
    known = op.resolve_dims({**op.cpu_dims, **dims})
    return op.inputs(known, op.resolve_options({}), torch.device(device), seed)


def called(op: Op, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The outputs, and the inputs that the call changed."""
    given = op.fresh(inputs)
    assert op.call is not None
    out = op.call(**given)
    return {n: x for n, x in {**out, **{f"{n} after": given.get(n) for n in op.mutates}}.items() if x is not None}


def numbers(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Normal numbers of one seed, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def matmul(M: int, N: int, K: int, dtype: torch.dtype, layout: str = "row", **options: Any) -> Example:
    def run(device: str, seed: int) -> Any:
        a, b = (
            numbers(M, K, dtype=dtype, device=device, seed=seed),
            numbers(K, N, dtype=dtype, device=device, seed=seed + 1),
        )
        if layout == "transposed":  # the same matrices with the other axis contiguous
            a, b = a.T.contiguous().T, b.T.contiguous().T
        limit = 1e-3 if options.get("precision") == "tf32" else max(ROUNDING[options.get("out_dtype") or dtype], 2e-6)
        return (ops.matmul(a, b, **options),), (matmul_reference.matmul(a, b),), limit

    extra = "".join(f"-{x}".replace("torch.", "") for x in options.values())
    return Example(f"matmul-{M}x{N}x{K}-{layout}-{_short(dtype)}{extra}", run)


def softmax(R: int, N: int, dtype: torch.dtype, scale: float = 4.0) -> Example:
    def run(device: str, seed: int) -> Any:
        x = numbers(R, N, dtype=F32, seed=seed).mul(scale).to(device, dtype)
        return (ops.softmax(x),), (softmax_reference.softmax(x),), ROUNDING[dtype] * 1.5

    return Example(f"softmax-{R}x{N}-{_short(dtype)}", run)


def rmsnorm(R: int, D: int, dtype: torch.dtype, weight: torch.dtype | None = None) -> Example:
    def run(device: str, seed: int) -> Any:
        x = numbers(R, D, dtype=dtype, device=device, seed=seed)
        w = numbers(D, dtype=weight or dtype, device=device, seed=seed + 1)
        return (ops.rmsnorm(x, w, 1e-5),), (rmsnorm_reference.rmsnorm(x, w, 1e-5),), ROUNDING[dtype] * 1.5

    return Example(f"rmsnorm-{R}x{D}-{_short(dtype)}-{_short(weight or dtype)}", run)


def attention(
    B: int, T: int, S: int, H: int, HK: int, D: int, V: int, dtype: torch.dtype, causal: bool = True, view: bool = False
) -> Example:
    def run(device: str, seed: int) -> Any:
        q = numbers(B, T, H, D, dtype=dtype, device=device, seed=seed)
        k = numbers(B, S, HK, D, dtype=dtype, device=device, seed=seed + 1)
        v = numbers(B, S, HK, V, dtype=dtype, device=device, seed=seed + 2)
        if view:  # [B, H, T, D] in memory, as SDPA has it
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        limit = {BF16: 5e-3, F16: 8e-4, F32: 5e-6}[dtype]
        return (
            ops.attention(q, k, v, causal=causal, return_lse=True),
            attention_reference.attention(q, k, v, causal=causal),
            limit,
        )

    form = ("causal" if causal else "full") + ("-view" if view else "")
    return Example(f"attention-B{B}-T{T}-S{S}-H{H}-{HK}-D{D}-{V}-{form}-{_short(dtype)}", run)


def segment_sum(lengths: list[int], D: int, dtype: torch.dtype, offsets: torch.dtype = torch.int32) -> Example:
    def run(device: str, seed: int) -> Any:
        values = numbers(sum(lengths), D, dtype=dtype, device=device, seed=seed)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, offsets)
        limit = ROUNDING[dtype]
        return (ops.segment_sum(values, cu_seqlens),), (segment_reference.segment_sum(values, cu_seqlens),), limit

    return Example(f"segment_sum-{len(lengths)}-of-{sum(lengths)}x{D}-{_short(dtype)}", run)


def _short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F16: "f16", F32: "f32"}[dtype]


RAGGED = [0, 0, 5, 1, 64, 0, 33, 100, 1, 0]
SMALL = [
    *[matmul(*shape, dtype) for shape in ((1, 1, 1), (5, 7, 3), (64, 64, 64)) for dtype in (BF16, F16, F32)],
    matmul(130, 129, 127, BF16),
    matmul(300, 40, 50, F32),
    matmul(128, 256, 128, BF16),
    matmul(33, 100, 257, F16, "transposed"),
    matmul(70, 50, 96, F32, "transposed", precision="tf32"),
    matmul(17, 33, 65, BF16, out_dtype=F32),
    *[softmax(3, N, dtype) for N in (1, 7, 1000) for dtype in (BF16, F32)],
    softmax(5, 33, F16),
    softmax(70, 16, F32, scale=50.0),
    softmax(2, 9000, F32),
    *[rmsnorm(3, D, dtype) for D in (96, 2304, 7168) for dtype in (BF16, F32)],
    rmsnorm(70, 96, F16),
    rmsnorm(1, 1, F32),
    rmsnorm(5, 200, BF16, F32),
    attention(1, 1, 1, 1, 1, 64, 64, BF16),
    attention(2, 70, 70, 4, 2, 64, 64, BF16),
    attention(1, 130, 130, 2, 1, 96, 96, BF16),
    attention(1, 65, 65, 2, 2, 128, 128, F16),
    attention(1, 33, 100, 3, 1, 64, 128, F32),
    attention(2, 40, 70, 2, 2, 96, 32, F32, causal=False, view=True),
    attention(1, 64, 128, 2, 2, 64, 64, BF16, causal=False),
    segment_sum(RAGGED, 70, F32),
    segment_sum(RAGGED, 128, BF16, torch.int64),
    segment_sum([1], 1, F16),
    segment_sum([0, 0], 8, F32),
]
