"""The whole Stable LatentMoE block as one torch function, made of the ops."""

from __future__ import annotations

from collections.abc import Callable

import torch

from k3dsl.ops.common import check_rank, check_same, check_tensor, fail
from k3dsl.ops.moe.activation import situ, swiglu
from k3dsl.ops.moe.experts import ACTIVATIONS, moe_experts
from k3dsl.ops.moe.router import moe_router
from k3dsl.ops.rmsnorm.api import rmsnorm

Matrix = torch.Tensor | None


def _check_parts(x: torch.Tensor, parts: dict[str, Matrix], group: tuple[str, ...], what: str) -> bool:
    """Whether the matrices of a group are given; all of them or none."""
    given = [name for name in group if parts[name] is not None]
    if given and len(given) < len(group):
        (missing, *_) = [name for name in group if name not in given]
        fail(missing, f"is missing, and {given[0]} is given", f"pass {', '.join(group)} together: {what}")
    for name in given:
        w = parts[name]
        assert w is not None
        check_tensor(name, w, (x.dtype,))
        check_rank(name, w, 2, "[out, in]", "a weight as torch.nn.Linear has it")
        check_same(name, w, "x", x)
        if name in ("latent_up", "shared_down") and w.shape[0] != x.shape[-1]:
            fail(name, f"gives {w.shape[0]} columns, x has {x.shape[-1]}", "pass [hidden, in], hidden the width of x")
    return bool(given)


def _linear(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.shape[1] != x.shape[-1]:
        fail(name, f"takes {weight.shape[1]} columns, and there are {x.shape[-1]}", "pass [out, in]")
    return torch.nn.functional.linear(x, weight)


def latent_moe(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    *,
    top_k: int,
    latent_down: torch.Tensor | None = None,
    latent_up: torch.Tensor | None = None,
    latent_norm: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    shared_up: torch.Tensor | None = None,
    shared_down: torch.Tensor | None = None,
    gate_scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    renormalize: bool = True,
    routed_scale: float = 1.0,
    scoring: str = "sigmoid",
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float = 25.0,
    eps: float = 1e-5,
    first_expert: int = 0,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Stable LatentMoE (Kimi K3 report, section 2.3): experts that work in a narrower latent space, beside a shared one.

    weights, ids = moe_router(x); y = moe_experts(latent_down x); y = RMSNorm(y), of the complete sum; the result is
    latent_up y + Shared(x), with Shared(x) = shared_down SiTU(shared_gate x, shared_up x). Without the latent parts, and with
    activation='silu', it is the block of Kimi Linear.

    Args:
        x: [..., hidden], the layer's normed input. The router and the shared expert read it, and so do the experts where
            there is no latent space.
        router_weight: [E, hidden]; router_bias: [E] fp32 or None; top_k, renormalize, scoring as in `moe_router`.
        routed_scale: of the routing weights.
        w_gate, w_up, w_down, gate_scale, up_scale, down_scale, activation, beta, linear_beta: as in `moe_experts`, D the
            latent width.
        latent_down: [D, hidden] and latent_up: [hidden, D], together; latent_norm: [D], with them.
        shared_gate, shared_up: [S, hidden], shared_down: [hidden, S], together.
        eps: of the latent norm.
        first_expert: with expert parallelism, the number of this rank's first expert: w_gate holds experts first_expert to
            first_expert + w_gate.shape[0] of the router's E.
        reduce: sums y over ranks. It runs before the norm, which is not linear: a norm of partial sums is wrong.

    Returns:
        [..., hidden] in x's dtype. Differentiable as its parts are.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    if activation not in ACTIVATIONS:
        fail("activation", f"is {activation!r}", f"one of {', '.join(ACTIVATIONS)}")
    parts: dict[str, Matrix] = {
        "latent_down": latent_down, "latent_up": latent_up, "shared_gate": shared_gate, "shared_up": shared_up,
        "shared_down": shared_down,
    }  # fmt: skip
    latent = _check_parts(x, parts, ("latent_down", "latent_up"), "into the latent space and out of it")
    shared = _check_parts(x, parts, ("shared_gate", "shared_up", "shared_down"), "one MLP")
    if latent_norm is not None and not latent:
        fail("latent_norm", "is given without latent_down and latent_up", "pass all three, or none")
    if latent_down is not None and latent_norm is not None:
        check_tensor("latent_norm", latent_norm, (x.dtype, torch.float32))
        if latent_norm.shape != latent_down.shape[:1]:
            reason = f"has shape {list(latent_norm.shape)}, needs [D] = {list(latent_down.shape[:1])} of latent_down"
            fail("latent_norm", reason, "one number a channel of the latent space")
    check_tensor("router_weight", router_weight)
    check_rank("router_weight", router_weight, 2, "[E, hidden]", "the router's weight")
    check_tensor("w_gate", w_gate, (x.dtype, torch.uint8))
    check_rank("w_gate", w_gate, 3, "[E, I, D]", "all experts in one tensor")
    experts, held = router_weight.shape[0], w_gate.shape[0]
    if isinstance(first_expert, bool) or not 0 <= first_expert <= experts - held:
        reason = f"is {first_expert!r}, and w_gate holds {held} experts of the router's {experts}"
        fail(
            "first_expert", reason, f"a number from 0 to {experts - held}" if held <= experts else "pass fewer experts"
        )

    weights, ids = moe_router(
        x, router_weight, router_bias, top_k, renormalize=renormalize, scale=routed_scale, scoring=scoring
    )
    if held < experts:
        ids = torch.where((ids >= first_expert) & (ids < first_expert + held), ids - first_expert, -1)
    z = _linear("latent_down", x, latent_down) if latent_down is not None else x
    y = moe_experts(
        z, w_gate, w_up, w_down, weights, ids, gate_scale=gate_scale, up_scale=up_scale, down_scale=down_scale,
        activation=activation, beta=beta, linear_beta=linear_beta, ranks=max(1, experts // max(1, held)),
    )  # fmt: skip
    if reduce is not None:
        y = reduce(y)
    if latent_norm is not None:
        y = rmsnorm(y, latent_norm, eps)
    if latent_up is not None:
        y = _linear("latent_up", y, latent_up)
    if not shared:
        return y
    assert shared_gate is not None and shared_up is not None and shared_down is not None  # noqa: PT018
    gate, up = _linear("shared_gate", x, shared_gate), _linear("shared_up", x, shared_up)
    h = situ(gate, up, beta=beta, linear_beta=linear_beta) if activation == "situ" else swiglu(gate, up)
    return y + _linear("shared_down", h, shared_down)
