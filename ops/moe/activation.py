"""SiTU-GLU and SwiGLU on torch tensors: checks, launch, registration with torch.library."""

from __future__ import annotations

import math
from typing import Any

import torch

from k3dsl.ops.common import Caller, check_contiguous_rows, check_same, check_tensor, fail
from k3dsl.ops.moe.space import SITU
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.replay import replayed

_call = Caller(SITU)


def _options(dtype: torch.dtype, activation: str, beta: float, linear_beta: float, backward: bool) -> dict[str, Any]:
    options = {"activation": activation, "beta": beta, "linear_beta": linear_beta}
    return {"dtype": dtype, **(SITU.canonical or dict)(options), "backward": backward}


def _dims(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"R": (rows,), "I": (columns, 128, 16, 8)}


@torch_op("situ")
def _situ(gate: torch.Tensor, up: torch.Tensor, activation: str, beta: float, linear_beta: float) -> torch.Tensor:
    if gate.numel() == 0:
        return gate.new_empty(gate.shape)
    options = _options(gate.dtype, activation, beta, linear_beta, backward=False)
    return _call({"gate": gate, "up": up}, _dims(*gate.shape), options)["y"]


@_situ.register_fake
def _(gate, up, activation, beta, linear_beta):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("k3dsl::situ_backward", mutates_args=())
def backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up [R, I] from that of the output."""
    if gate.numel() == 0:
        return gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    options = _options(gate.dtype, activation, beta, linear_beta, backward=True)
    out = _call({"gate": gate, "up": up, "grad": grad}, _dims(*gate.shape), options)
    return out["grad_gate"], out["grad_up"]


@backward.register_fake
def _(gate, up, grad, activation, beta, linear_beta):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, *ctx.how = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    return (*backward(gate, up, grad.to(gate.dtype), *ctx.how), None, None, None)


_situ.register_autograd(_backward, setup_context=_setup_context)


def check_betas(beta: float, linear_beta: float) -> None:
    """Raises ArgumentError unless both are positive finite numbers."""
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            fail(name, f"is {value!r}", "a positive finite number; Kimi K3 has beta 4 and linear_beta 25")


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensor("gate", gate)
    if gate.dim() < 1:
        fail("gate", "is a scalar, needs [..., I]", "pass a vector or more")
    if up is None:
        if gate.shape[-1] % 2:
            fail(
                "gate", f"has {gate.shape[-1]} columns, no gate and up of equal width", "pass [..., 2 I], or up as well"
            )
        half = gate.shape[-1] // 2
        return gate[..., :half], gate[..., half:]
    check_tensor("up", up)
    check_same("up", up, "gate", gate)
    if up.shape != gate.shape:
        fail("up", f"has shape {list(up.shape)}, gate has {list(gate.shape)}", "pass gate and up of one shape")
    return gate, up


def _glu(gate: torch.Tensor, up: torch.Tensor | None, activation: str, beta: float, linear_beta: float) -> torch.Tensor:
    left, right = _halves(gate, up)
    rows = [t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (left, right)]
    rows = [t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous() for t in rows]
    for name, t in zip(("gate", "up"), rows, strict=True):
        check_contiguous_rows(name, t)
    return _situ(*rows, activation, float(beta), float(linear_beta)).reshape(left.shape)


@replayed
def situ(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, beta: float = 4.0, linear_beta: float = 25.0
) -> torch.Tensor:
    """SiTU-GLU of Kimi K3: [beta tanh(g / beta) sigmoid(g)] [linear_beta tanh(u / linear_beta)], in fp32, rounded once.

    Args:
        gate: [..., I], bf16, fp16 or fp32, or with up=None [..., 2 I]: the gate first, then the linear part. Rows of any
            stride, so halves of one tensor cost no copy.
        up: [..., I] of gate's shape and dtype.
        beta, linear_beta: where the two factors saturate. A new value compiles anew.

    Returns:
        [..., I] in gate's dtype. Differentiable, with a kernel of its own.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_betas(beta, linear_beta)
    return _glu(gate, up, "situ", beta, linear_beta)


@replayed
def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU, g sigmoid(g) u, in fp32, rounded once; arguments, result and errors as `situ`."""
    return _glu(gate, up, "silu", 4.0, 25.0)
