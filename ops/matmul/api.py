"""matmul on torch tensors: checks, launch, registration with torch.library."""

from __future__ import annotations

from typing import Any

import torch

from k3dsl.ops.common import Caller, check_rank, check_same, check_tensor, dtype_name, fail, rows_of
from k3dsl.ops.matmul.space import MATMUL
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.replay import replayed

_call = Caller(MATMUL)
_PRECISIONS = ("ieee", "tf32x3", "tf32")


@torch_op("matmul")
def _matmul(a: torch.Tensor, b: torch.Tensor, precision: str, out_dtype: torch.dtype) -> torch.Tensor:
    (M, K), N = a.shape, b.shape[1]
    if M * N * K == 0:
        return a.new_zeros((M, N), dtype=out_dtype)
    dims = {"M": (M, 128), "N": (N, 128, 16, 8), "K": (K, 128, 64, 16, 8)}
    options = {"dtype": a.dtype, "out_dtype": out_dtype, "precision": precision}
    return _call({"a": a, "b": b}, dims, options)["o"]


@_matmul.register_fake
def _(a, b, precision, out_dtype):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.precision, _ = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    grad = grad.to(a.dtype)
    grad_a = _matmul(grad, b.T, ctx.precision, a.dtype) if ctx.needs_input_grad[0] else None
    grad_b = _matmul(a.T, grad, ctx.precision, b.dtype) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, None, None


_matmul.register_autograd(_backward, setup_context=_setup_context)


@replayed
def matmul(
    a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee", out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """a times b, accumulated in fp32.

    Args:
        a: [..., K]. b: [K, N], of a's dtype: bf16, fp16 or fp32. Any strides; a transposed view costs no copy.
        precision: how fp32 products are formed, 'ieee', 'tf32x3' or 'tf32'; nothing to 16-bit inputs.
        out_dtype: bf16, fp16 or fp32; None for a's dtype.

    Returns:
        [..., N]. Differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("a", a)
    check_tensor("b", b)
    check_rank("b", b, 2, "[K, N]", "one matrix; loop over a batch of them")
    if a.dim() < 1:
        fail("a", "is a scalar, needs [..., K]", "pass a vector or a matrix")
    if a.shape[-1] != b.shape[0]:
        fail("b", f"has K = {b.shape[0]} rows, a has {a.shape[-1]} columns", "pass b as [K, N]: b.T if it is [N, K]")
    check_same("b", b, "a", a)
    if precision not in _PRECISIONS:
        fail("precision", f"is {precision!r}", f"one of {', '.join(_PRECISIONS)}")
    out_dtype = a.dtype if out_dtype is None else out_dtype
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        fail("out_dtype", f"is {dtype_name(out_dtype)}", "bfloat16, float16 or float32")
    return _matmul(rows_of(a), b, precision, out_dtype).reshape(*a.shape[:-1], b.shape[1])
