"""Sorting by expert and the routed experts on torch tensors: checks, launches, registration with torch.library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from k3dsl.ops.common import (
    Caller,
    check_contiguous_rows,
    check_is_tensor,
    check_rank,
    check_same,
    check_tensor,
    dtype_name,
    fail,
    rows_of,
)
from k3dsl.ops.moe.activation import check_betas
from k3dsl.ops.moe.experts_backward import gradients
from k3dsl.ops.moe.space import EXPERTS, SORT
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.replay import replayed

_sort_call, _experts_call = Caller(SORT), Caller(EXPERTS)
ACTIVATIONS = ("situ", "silu")
PRECISIONS = ("ieee", "tf32x3", "tf32")
BLOCKS = tuple(SORT.options[0].choices)
MAX_PAIRS = 2**31 - 2**16
"""Pairs are numbered in int32, and a program may count on to the end of its chunk."""


class ExpertOrder(NamedTuple):
    """What `moe_sort` returns; all int32."""

    order: torch.Tensor
    slots: torch.Tensor
    expert_offsets: torch.Tensor
    block_expert: torch.Tensor
    block_row: torch.Tensor


def bound_of(pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks of block_m rows that so many pairs can need."""
    return min(pairs, -(-pairs // block_m) + num_experts - 1)


@torch.library.custom_op("k3dsl::moe_sort", mutates_args=())
def _sort(
    ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    T, K = ids.shape
    if T * K == 0:
        empty = [ids.new_empty(0, dtype=torch.int32) for _ in range(4)]
        return empty[0], empty[1], ids.new_zeros(num_experts + 1, dtype=torch.int32), empty[2], empty[3]
    options = {"block_m": block_m, "ids_dtype": ids.dtype}
    out = _sort_call({"ids": ids.reshape(-1)}, {"T": (T,), "E": num_experts, "K": K}, options)
    return out["order"], out["slots"], out["expert_offsets"], out["block_expert"], out["block_row"]


@_sort.register_fake
def _(ids, num_experts, block_m):
    pairs = ids.shape[0] * ids.shape[1]
    bound = bound_of(pairs, num_experts, block_m)
    sizes = (pairs, pairs, num_experts + 1, bound, bound)
    return tuple(ids.new_empty(n, dtype=torch.int32) for n in sizes)


def _check_ids(ids: torch.Tensor) -> None:
    check_tensor("ids", ids, (torch.int32, torch.int64))
    check_rank("ids", ids, 2, "[T, K]", "the K experts of each token")
    if ids.numel() > MAX_PAIRS:
        fail("ids", f"has {ids.numel()} entries, more than int32 can number", "split the tokens over calls")


@replayed
def moe_sort(ids: torch.Tensor, num_experts: int, block_m: int = 64) -> ExpertOrder:
    """Puts the choices of all tokens in the order of their experts, on the device and without waiting for it.

    A pair is one choice of one token, number t K + j. The order within an expert is that of the pairs, so it is the same in
    every run.

    Args:
        ids: [T, K] int32 or int64. What is no expert (-1, or num_experts and above) counts as nothing.
        num_experts: E.
        block_m: rows of a block, 16, 32, 64, 128, 192 or 256.

    Returns:
        order [T K]: the pairs by expert, those of no expert last. slots [T K]: where each pair is in it, -1 for one of no
        expert. expert_offsets [E + 1]: the first row of each expert, and the number of rows of all. block_expert and
        block_row [min(T K, ceil(T K / block_m) + E - 1)]: expert and first row of each block of rows; expert -1 past the
        last.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    _check_ids(ids)
    if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
        fail("num_experts", f"is {num_experts!r}", "an integer of at least 1")
    if block_m not in BLOCKS:
        fail("block_m", f"is {block_m!r}", f"one of {', '.join(map(str, BLOCKS))}")
    return ExpertOrder(*_sort(ids, num_experts, block_m))


# ---- experts -----------------------------------------------------------------------------------------------------------

_NAMES = (
    "x", "w_gate", "w_up", "w_down", "weights", "ids", "gate_scale", "up_scale", "down_scale", "activation", "beta",
    "linear_beta", "precision", "ranks",
)  # fmt: skip
_DIFFERENTIABLE = 5


@torch_op("moe_experts")
def _experts(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    activation: str,
    beta: float,
    linear_beta: float,
    precision: str,
    ranks: int,
) -> torch.Tensor:
    (T, D), K, (E, I) = x.shape, ids.shape[1], w_gate.shape[:2]
    if T * K * D * E * I == 0:
        return x.new_zeros((T, D))
    options = {
        "dtype": x.dtype, "weights": "plain" if gate_scale is None else "mxfp4", "activation": activation, "beta": beta,
        "linear_beta": linear_beta, "precision": precision, "ids_dtype": ids.dtype, "ranks": ranks,
    }  # fmt: skip
    tensors = {
        "x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down, "weights": weights.contiguous(), "ids": ids.reshape(-1)
    }  # fmt: skip
    if gate_scale is not None and up_scale is not None and down_scale is not None:
        tensors |= {"gate_scale": gate_scale, "up_scale": up_scale, "down_scale": down_scale}
    return _experts_call(tensors, {"T": (T,), "E": E, "K": K, "D": D, "I": I}, EXPERTS.canonical(options))["out"]  # type: ignore[misc]


@_experts.register_fake
def _(x, *rest):
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.how = inputs[9:12]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    found = gradients(ctx.needs_input_grad[:_DIFFERENTIABLE], grad, *ctx.saved_tensors, *ctx.how)
    return (*found, *[None] * (len(_NAMES) - _DIFFERENTIABLE))


_experts.register_autograd(_backward, setup_context=_setup_context)


def _halves(weight: torch.Tensor, name: str, scale: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The two halves of a fused [E, 2 I, D] tensor and of its scales, as views."""
    if weight.shape[1] % 2:
        fail(name, f"has {weight.shape[1]} rows an expert, no gate and up of equal height", "pass [E, 2 I, D], or w_up")
    half = weight.shape[1] // 2
    parts: list[torch.Tensor | None] = [weight[:, :half], weight[:, half:]]
    return parts + ([None, None] if scale is None else [scale[:, :half], scale[:, half:]])


def _check_weights(x: torch.Tensor, weights: dict[str, torch.Tensor], scales: dict[str, torch.Tensor | None]) -> None:
    packed = weights["w_gate"].dtype == torch.uint8
    per = 2 if packed else 1
    E, I, D = *weights["w_gate"].shape[:2], weights["w_gate"].shape[2] * per
    if x.dim() < 1 or x.shape[-1] != D:
        remedy = "experts of Kimi K3 take the latent width 3584, not hidden_size"
        fail("x", f"has shape {list(x.shape)}, needs [..., D] with D = {D} of w_gate", remedy)
    shapes = {"w_gate": (E, I, D), "w_up": (E, I, D), "w_down": (E, D, I)}
    for name, w in weights.items():
        want = (*shapes[name][:2], shapes[name][2] // per)
        if tuple(w.shape) != want:
            fail(name, f"has shape {list(w.shape)}, needs {list(want)}", "w_gate, w_up [E, I, D] and w_down [E, D, I]")
    for name, scale in scales.items():
        weight = "w_" + name.removesuffix("_scale")
        if not packed and scale is not None:
            fail(name, f"is given, but {weight} is {weights[weight].dtype}", "pack MXFP4 weights as uint8")
        if not packed:
            continue
        if scale is None:
            fail(name, f"is missing, and {weight} is packed", "pass weight_scale, uint8 with one byte for 32 columns")
        if check_is_tensor(name, scale).dtype != torch.uint8:
            fail(
                name,
                f"is {dtype_name(scale.dtype)}, needs uint8",
                "pass the checkpoint's bytes b, which stand for 2^(b - 127); a cast makes others",
            )
        check_same(name, scale, "x", x, dtype=False)
        want = (*shapes[weight][:2], shapes[weight][2] // 32)
        if shapes[weight][2] % 32:
            fail(weight, f"has {shapes[weight][2]} columns, no multiple of 32", "MXFP4 comes in groups of 32")
        if tuple(scale.shape) != want:
            fail(name, f"has shape {list(scale.shape)}, needs {list(want)}", "one byte for 32 columns")
        check_contiguous_rows(name, scale)
    if packed and x.dtype != torch.bfloat16:
        fail("x", f"is {x.dtype}, and MXFP4 weights are multiplied as bf16", "x.to(torch.bfloat16)")


@replayed
def moe_experts(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    gate_scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float = 25.0,
    precision: str = "ieee",
    ranks: int = 1,
) -> torch.Tensor:
    """The weighted sum of each token's experts: out[t] = sum over j of weights[t, j] f_e(x[t]) with e = ids[t, j].

    f_e(z) = W_down,e SiTU(W_gate,e z, W_up,e z). Each expert's output is rounded to x's dtype, times its fp32 weight, summed
    in fp32 in the order of j, and rounded; no atomics, so repeats are equal bit for bit.

    Args:
        x: [..., D], bf16, fp16 or fp32; rows of any stride.
        w_gate, w_up: [E, I, D] of x's dtype, or MXFP4: uint8 [E, I, D/2], two codes a byte, the low four bits first. With
            w_up=None w_gate is [E, 2 I, D], gate rows first. Any strides, last dim contiguous.
        w_down: [E, D, I], or uint8 [E, D, I/2].
        weights: [..., K] fp32 of the router. ids: [..., K] int32 or int64; -1, and anything that is no expert, counts as
            nothing (a dropped choice, an expert of another rank).
        gate_scale, up_scale, down_scale: of MXFP4 weights, uint8 [E, I, D/32], [E, I, D/32], [E, D, I/32]; byte b is
            2^(b - 127). With w_up=None gate_scale is [E, 2 I, D/32].
        activation: 'situ' with beta and linear_beta, or 'silu' (SwiGLU, which Kimi Linear has).
        precision: how fp32 products are formed, 'ieee', 'tf32x3' or 'tf32'; nothing to 16-bit inputs.
        ranks: over how many ranks the router's experts are spread, so that about one choice in so many is an expert here.
            It changes how the work is divided, and no number.

    Returns:
        [..., D] in x's dtype. Differentiable to x, weights and weights of the experts that are not packed; the backward pass
        is plain torch, one block of rows after the other: right, but slow.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    check_betas(beta, linear_beta)
    if activation not in ACTIVATIONS:
        fail("activation", f"is {activation!r}", f"one of {', '.join(ACTIVATIONS)}")
    if precision not in PRECISIONS:
        fail("precision", f"is {precision!r}", f"one of {', '.join(PRECISIONS)}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        fail("ranks", f"is {ranks!r}", "an integer of at least 1")
    named = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    for name, w in named.items():
        if name == "w_up" and w is None:
            continue
        check_tensor(name, w, (x.dtype, torch.uint8))
        assert w is not None
        check_rank(name, w, 3, "[E, out, in]", "all experts in one tensor")
        if w.dtype != w_gate.dtype:
            reason = f"is {dtype_name(w.dtype)}, w_gate is {dtype_name(w_gate.dtype)}"
            fail(name, reason, "pass all three plain, or all three packed as MXFP4; a cast packs nothing")
        check_same(name, w, "w_gate", w_gate)
        check_same(name, w, "x", x, dtype=False)
        check_contiguous_rows(name, w)
    if w_up is None:
        if up_scale is not None:
            fail("up_scale", "is given without w_up", "pass the fused scales as gate_scale")
        w_gate, w_up, gate_scale, up_scale = _halves(w_gate, "w_gate", gate_scale)  # type: ignore[assignment]
    assert w_up is not None
    _check_weights(
        x,
        {"w_gate": w_gate, "w_up": w_up, "w_down": w_down},
        {"gate_scale": gate_scale, "up_scale": up_scale, "down_scale": down_scale},
    )
    check_tensor("weights", weights, (torch.float32,))
    check_tensor("ids", ids, (torch.int32, torch.int64))
    for name, t in (("ids", ids), ("weights", weights)):
        check_same(name, t, "x", x, dtype=False)
        if t.dim() != x.dim() or t.shape[:-1] != x.shape[:-1] or t.shape != ids.shape:
            need = [*x.shape[:-1], "K" if name == "ids" else ids.shape[-1]]
            fail(name, f"has shape {list(t.shape)}, needs {need}", "K choices for each token of x")
    K, tokens = ids.shape[-1], rows_of(x)
    check_contiguous_rows("x", tokens)
    flat = ids.reshape(tokens.shape[0], K)
    _check_ids(flat)
    out = _experts(
        tokens, w_gate, w_up, w_down, weights.reshape(tokens.shape[0], K), flat, gate_scale, up_scale, down_scale,
        activation, float(beta), float(linear_beta), precision, ranks,
    )  # fmt: skip
    return out.reshape(x.shape)
