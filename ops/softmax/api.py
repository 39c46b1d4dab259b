"""softmax on torch tensors: checks, launch, registration with torch.library."""

from __future__ import annotations

from typing import Any

import torch

from k3dsl.ops.common import FLOATS, Caller, check_tensor, dtype_name, fail, rows_of
from k3dsl.ops.registration import torch_op
from k3dsl.ops.softmax.space import SOFTMAX
from k3dsl.runtime.replay import replayed

_call = Caller(SOFTMAX)


@torch_op("softmax")
def _softmax(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=dtype)
    R, N = x.shape
    return _call({"x": x}, {"R": (R,), "N": (N, 16)}, {"dtype": x.dtype, "out_dtype": dtype})["o"]


@_softmax.register_fake
def _(x, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    # dx = y (dy - sum(y dy)), in plain torch
    y = ctx.saved_tensors[0].float()
    g = grad.float()
    return (y * (g - (y * g).sum(-1, keepdim=True))).to(ctx.dtype), None


_softmax.register_autograd(_backward, setup_context=_setup_context)


@replayed
def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """exp(x - max x) / sum exp(x - max x) over the last dim, computed in fp32.

    Args:
        x: [..., N], bf16, fp16 or fp32.
        dim: the last one, -1 or its number.
        dtype: of the result, bf16, fp16 or fp32; None for x's. (torch.softmax converts x first; here only the result is.)

    Returns:
        [..., N]. A row that is all -inf gives NaN, as in torch. Differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    if x.dim() < 1:
        fail("x", "is a scalar, needs [..., N]", "pass a vector or more")
    if dim not in (-1, x.dim() - 1):
        fail(
            "dim",
            f"is {dim}, x has its rows along dim {x.dim() - 1}",
            f"softmax(x.movedim({dim}, -1)).movedim(-1, {dim})",
        )
    dtype = x.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        fail("dtype", f"is {dtype_name(dtype)}", "bfloat16, float16 or float32")
    return _softmax(rows_of(x), dtype).reshape(x.shape)
