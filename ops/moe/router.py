"""The router on torch tensors: checks, launches, registration with torch.library."""

from __future__ import annotations

import math
from typing import Any

import torch

from k3dsl.ops.common import Caller, check_contiguous_rows, check_rank, check_same, check_tensor, dtype_name, fail
from k3dsl.ops.moe import reference
from k3dsl.ops.moe.space import ROUTER, TOPK
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.replay import replayed

_topk_call, _router_call = Caller(TOPK), Caller(ROUTER)
SCORINGS = ("sigmoid", "softmax")
_Pair = tuple[torch.Tensor, torch.Tensor]


def _empty(x: torch.Tensor, top_k: int) -> _Pair:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


@torch_op("moe_topk")
def _topk(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, renormalize: bool, scale: float, scoring: str
) -> _Pair:
    T, E = logits.shape
    if T == 0:
        return _empty(logits, top_k)
    options = {"bias": bias is not None, "renormalize": renormalize, "scale": scale, "scoring": scoring}
    tensors = {"partial": logits.contiguous()[None], **({} if bias is None else {"bias": bias.contiguous()})}
    out = _topk_call(tensors, {"T": (T,), "E": E, "K": top_k}, options)
    return out["weights"], out["ids"]


@_topk.register_fake
def _(logits, bias, top_k, renormalize, scale, scoring):
    return _empty(logits, top_k)


@torch_op("moe_router")
def _router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    scale: float,
    scoring: str,
) -> _Pair:
    (T, D), E = x.shape, weight.shape[0]
    if T == 0:
        return _empty(x, top_k)
    options = {
        "dtype": x.dtype, "weight_dtype": weight.dtype, "bias": bias is not None, "renormalize": renormalize,
        "scale": scale, "scoring": scoring,
    }  # fmt: skip
    tensors = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias.contiguous()})}
    out = _router_call(tensors, {"T": (T,), "D": D, "E": E, "K": top_k}, options)
    return out["weights"], out["ids"]


@_router.register_fake
def _(x, weight, bias, top_k, renormalize, scale, scoring):
    return _empty(x, top_k)


def _weights(logits: torch.Tensor, ids: torch.Tensor, renormalize: bool, scale: float, scoring: str) -> torch.Tensor:
    picked = reference.scores(logits, scoring).gather(1, ids.long())
    return (picked / (picked.sum(1, keepdim=True) + 1e-20) if renormalize else picked) * scale


def _topk_context(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    logits, _, _, *ctx.how = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _topk_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    """The chosen scores again in plain torch, differentiated; the choice itself and the bias have no gradient."""
    logits, ids = ctx.saved_tensors
    with torch.enable_grad():
        given = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(_weights(given, ids, *ctx.how), given, grad)
    return found, None, None, None, None, None


def _router_context(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    x, weight, _, _, *ctx.how = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _router_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, ids = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, weight)]
        logits = inputs[0].float() @ inputs[1].float().T
        found = torch.autograd.grad(_weights(logits, ids, *ctx.how), inputs, grad)
    return (*found, None, None, None, None, None)


_topk.register_autograd(_topk_backward, setup_context=_topk_context)
_router.register_autograd(_router_backward, setup_context=_router_context)


def _check_choice(E: int, bias: torch.Tensor | None, top_k: int, scale: float, scoring: str, like: Any) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= E:
        fail("top_k", f"is {top_k!r}, there are E = {E} experts", f"an integer from 1 to {E}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        fail("scale", f"is {scale!r}", "a finite number; 1 leaves the weights as they are")
    if scoring not in SCORINGS:
        fail("scoring", f"is {scoring!r}", f"one of {', '.join(SCORINGS)}")
    if bias is None:
        return
    if isinstance(bias, torch.Tensor) and bias.dtype in (torch.bfloat16, torch.float16):
        remedy = "keep e_score_correction_bias in fp32 when a model is cast"
        fail("bias", f"is {dtype_name(bias.dtype)}, which changes what is selected; needs float32", remedy)
    check_tensor("bias", bias, (torch.float32,))
    check_same("bias", bias, like[0], like[1], dtype=False)
    if tuple(bias.shape) != (E,):
        fail("bias", f"has shape {list(bias.shape)}, needs [E] = [{E}]", "one number an expert")


@replayed
def moe_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    scoring: str = "sigmoid",
) -> _Pair:
    """Chooses the top_k experts of each token from router logits.

    score = sigmoid(logits); the experts with the highest score + bias are chosen, ties to the lowest id; their weights are
    score / (sum of the chosen scores + 1e-20) * scale, without the bias (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        logits: [..., E] fp32.
        bias: [E] fp32, for the selection only, or None.
        top_k: K, from 1 to E.
        renormalize: divides by the sum of the chosen scores.
        scale: of the weights. A new value compiles anew.
        scoring: 'sigmoid', or 'softmax' over all experts.

    Returns:
        (weights [..., K] fp32, ids [..., K] int32), from the best on. A NaN score ranks below every number, so ids are always
        distinct and in range; a token with fewer than K scores that are numbers gets weights of NaN. Weights are
        differentiable to the logits; the backward pass is plain torch.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("logits", logits, (torch.float32,))
    if logits.dim() < 1:
        fail("logits", "is a scalar, needs [..., E]", "one number an expert")
    _check_choice(logits.shape[-1], bias, top_k, scale, scoring, ("logits", logits))
    rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    weights, ids = _topk(rows, bias, top_k, renormalize, float(scale), scoring)
    lead = logits.shape[:-1]
    return weights.reshape(*lead, top_k), ids.reshape(*lead, top_k)


@replayed
def moe_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    scoring: str = "sigmoid",
) -> _Pair:
    """Chooses the top_k experts of each token: logits x weight^T as exact as sums in fp32 are, then `moe_topk`.

    Args:
        x: [..., D], bf16, fp16 or fp32; rows of any stride.
        weight: [E, D], fp32, bf16 or fp16: used as it is, never rounded. An infinity in x or weight makes its logits NaN.
        bias, top_k, renormalize, scale, scoring: as in `moe_topk`.

    Returns:
        (weights [..., K] fp32, ids [..., K] int32), as `moe_topk`. Weights are differentiable to x and weight; the backward
        pass is plain torch.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_rank("weight", weight, 2, "[E, D]", "one row an expert")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        fail(
            "x", f"has shape {list(x.shape)}, needs [..., D] with D = {weight.shape[1]} of weight", "pass whole tokens"
        )
    if weight.shape[1] == 0:
        fail("weight", "has no columns", "pass [E, D] with D of at least 1")
    check_same("weight", weight, "x", x, dtype=False)
    check_contiguous_rows("weight", weight)
    _check_choice(weight.shape[0], bias, top_k, scale, scoring, ("x", x))
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    check_contiguous_rows("x", rows)
    weights, ids = _router(rows, weight, bias, top_k, renormalize, float(scale), scoring)
    lead = x.shape[:-1]
    return weights.reshape(*lead, top_k), ids.reshape(*lead, top_k)
