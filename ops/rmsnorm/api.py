"""rmsnorm on torch tensors: checks, launch, registration with torch.library."""

from __future__ import annotations

import math
from typing import Any

import torch

from k3dsl.ops.common import Caller, check_same, check_tensor, dtype_name, fail, rows_of
from k3dsl.ops.registration import torch_op
from k3dsl.ops.rmsnorm.space import MAX_WIDTH, RMSNORM
from k3dsl.runtime.replay import replayed

_call = Caller(RMSNORM)


@torch_op("rmsnorm")
def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    R, D = x.shape
    options = {"dtype": x.dtype, "weight_dtype": weight.dtype, "eps": eps}
    return _call({"x": x, "weight": weight.contiguous()}, {"R": (R,), "D": D}, options)["y"]


@_rmsnorm.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    # with n = x r, r = 1/sqrt(mean x^2 + eps), g = dy w:  dx = r (g - n mean(g n)),  dw = sum(dy n); in plain torch
    x, weight = ctx.saved_tensors
    xf, dy = x.float(), grad.float()
    r = torch.rsqrt(xf.square().mean(-1, keepdim=True) + ctx.eps)
    n, g = xf * r, dy * weight.float()
    dx = r * (g - n * (g * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * n).sum(0).to(weight.dtype), None


_rmsnorm.register_autograd(_backward, setup_context=_setup_context)


@replayed
def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) in fp32, rounded to x's dtype, then times the weight (Llama's order of rounding).

    Args:
        x: [..., D], bf16, fp16 or fp32, D up to 65536.
        weight: [D], of x's dtype or fp32.
        eps: a finite number of at least 0. A new value compiles anew.

    Returns:
        [..., D] in x's dtype. Differentiable; the backward pass is plain torch.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    if x.dim() < 1 or not 1 <= x.shape[-1] <= MAX_WIDTH:
        fail("x", f"has shape {list(x.shape)}, needs [..., D] with D from 1 to {MAX_WIDTH}", "reshape it")
    if weight.shape != x.shape[-1:]:
        fail("weight", f"has shape {list(weight.shape)}, needs [D] = [{x.shape[-1]}]", "one number a channel of x")
    check_same("weight", weight, "x", x, dtype=False)
    if weight.dtype not in (x.dtype, torch.float32):
        fail("weight", f"is {dtype_name(weight.dtype)}, x is {dtype_name(x.dtype)}", "weight.to(x.dtype), or fp32")
    if not 0 <= eps < math.inf:
        fail("eps", f"is {eps}", "pass a finite number of at least 0")
    return _rmsnorm(rows_of(x), weight, float(eps)).reshape(x.shape)
