"""gated_rmsnorm on torch tensors: checks, launch, registration with torch.library."""

from __future__ import annotations

import math
from typing import Any

import torch

from k3dsl.ops.common import Caller, check_same, check_tensor, dtype_name, fail
from k3dsl.ops.gated_rmsnorm.space import GATED_RMSNORM, MAX_WIDTH
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.replay import replayed

_call = Caller(GATED_RMSNORM)


@torch_op("gated_rmsnorm")
def _gated_rmsnorm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    N, H, D = x.shape
    options = {
        "dtype": x.dtype,
        "gate_dtype": gate.dtype,
        "weight_dtype": weight.dtype,
        "eps": eps,
        "activation": activation,
    }
    tensors = {"x": x, "gate": gate, "weight": weight.contiguous()}
    return _call(tensors, {"N": (N, 64, 16), "H": H, "D": D}, options)["y"]


@_gated_rmsnorm.register_fake
def _(x, gate, weight, eps, activation):
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, gate, weight, ctx.eps, ctx.activation = inputs
    ctx.save_for_backward(x, gate, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    # with n = x r and s = act(gate): dgate = dy n w act'(gate), dw = sum(dy n s), and with h = dy w s: dx = r (h - n mean(h n))
    x, gate, weight = ctx.saved_tensors
    xf, gf, w, dy = x.float(), gate.float(), weight.float(), grad.float()
    r = torch.rsqrt(xf.square().mean(-1, keepdim=True) + ctx.eps)
    n, opened = xf * r, torch.sigmoid(gf)
    slope = opened * (1 - opened)
    if ctx.activation == "silu":
        opened, slope = gf * opened, opened + gf * slope
    h = dy * w * opened
    dx = r * (h - n * (h * n).mean(-1, keepdim=True))
    dw = (dy * n * opened).flatten(0, -2).sum(0)
    return dx.to(x.dtype), (dy * n * w * slope).to(gate.dtype), dw.to(weight.dtype), None, None


_gated_rmsnorm.register_autograd(_backward, setup_context=_setup_context)


@replayed
def gated_rmsnorm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, activation: str = "sigmoid"
) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight * sigmoid(gate), the mean over the last dim: the output norm of Kimi Linear.

    All arithmetic is fp32 and the result is rounded once, unlike `rmsnorm`, which rounds before the weight.
    Source: Kimi Linear (arXiv 2510.26692), section 4.

    Args:
        x: [..., H, D], bf16, fp16 or fp32, D up to 16384; any strides.
        gate: in x's shape, of x's dtype or fp32; any strides.
        weight: [D], shared by the heads, fp32 or x's dtype.
        eps: a number of at least 0. A new value compiles anew.
        activation: of the gate, "sigmoid" or "silu".

    Returns:
        x's shape and dtype. Differentiable; the backward pass is plain torch.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    check_tensor("gate", gate)
    check_tensor("weight", weight)
    if x.dim() < 2 or not 1 <= x.shape[-1] <= MAX_WIDTH:
        fail(
            "x", f"has shape {list(x.shape)}, needs [..., H, D] with D from 1 to {MAX_WIDTH}", "x.unflatten(-1, (H, D))"
        )
    if gate.shape != x.shape:
        fail(
            "gate",
            f"has shape {list(gate.shape)}, needs x's {list(x.shape)}",
            "pass a gate for every number of x; gate.expand_as(x) repeats a smaller one",
        )
    if weight.shape != x.shape[-1:]:
        fail("weight", f"has shape {list(weight.shape)}, needs [D] = [{x.shape[-1]}]", "one number a channel of a head")
    for name, t in (("gate", gate), ("weight", weight)):
        check_same(name, t, "x", x, dtype=False)
        if t.dtype not in (x.dtype, torch.float32):
            fail(name, f"is {dtype_name(t.dtype)}, x is {dtype_name(x.dtype)}", f"{name}.to(x.dtype), or fp32")
    if not 0 <= eps < math.inf:
        fail("eps", f"is {eps}", "pass a finite number of at least 0")
    if activation not in ("sigmoid", "silu"):
        fail("activation", f"is {activation!r}", 'pass "sigmoid" or "silu"')
    heads = x.shape[-2:]
    flat = (math.prod(x.shape[:-2]), *heads)
    y = _gated_rmsnorm(x.reshape(flat), gate.reshape(flat), weight, float(eps), activation)
    return y.view(x.shape)
