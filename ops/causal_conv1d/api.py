"""causal_conv1d on torch tensors: checks, launches, registration with torch.library, gradients in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from k3dsl.errors import ArgumentError
from k3dsl.ops.causal_conv1d.space import CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE, MAX_TOKENS, WIDTHS
from k3dsl.ops.common import (
    Caller,
    check_contiguous_rows,
    check_no_grad,
    check_offset_values,
    check_offsets,
    check_rank,
    check_same,
    check_slots,
    check_tensor,
    dtype_name,
    fail,
    gradients_again,
    has_data,
)
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.dispatch import ALIGNMENT
from k3dsl.runtime.replay import replayed

_call = Caller(CAUSAL_CONV1D)
_call_update = Caller(CAUSAL_CONV1D_UPDATE)


@torch_op("causal_conv1d")
def _causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    activation: bool,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (B, T, P), W = x.shape, weight.shape[1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    if x.numel() == 0:
        state = torch.zeros(N, W - 1, P, dtype=state_dtype, device=x.device)
        if initial_state is not None:
            state.copy_(initial_state)
        return x.new_empty(x.shape), state if output_final_state else x.new_empty(0)
    tensors = {"x": x, "weight": weight}
    if bias is not None:
        tensors["bias"] = bias
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens
    options = {
        "dtype": x.dtype,
        "weight_dtype": weight.dtype,
        "bias": bias is not None,
        "activation": activation,
        "initial_state": None if initial_state is None else initial_state.dtype,
        "final_state": state_dtype if output_final_state else None,
        "varlen": cu_seqlens is not None,
        "cu_dtype": None if cu_seqlens is None else cu_seqlens.dtype,
    }
    out = _call(tensors, {"B": (B,), "T": (T,), "P": P, "W": W, "N": (N,)}, options)
    return out["y"], out["final_state"] if output_final_state else x.new_empty(0)


@_causal_conv1d.register_fake
def _(x, weight, bias, initial_state, cu_seqlens, activation, output_final_state):
    y = x.new_empty(x.shape)
    if not output_final_state:
        return y, x.new_empty(0)
    states = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = x.dtype if initial_state is None else initial_state.dtype
    return y, x.new_empty((states, weight.shape[1] - 1, x.shape[2]), dtype=dtype)


def _plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    activation: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the final states in fp32 by differentiable torch operations, without waiting for the device.

    The states lie before the tokens in one list of rows; an index says where a token's j-th input is."""
    (B, T, P), W = x.shape, weight.shape[1]
    device = x.device
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, device=device) * T
    ends, N = cu_seqlens.long(), cu_seqlens.shape[0] - 1
    S, tokens = W - 1, torch.arange(B * T, device=device)
    number = torch.searchsorted(ends[1:].contiguous(), tokens, right=True)
    real, number = number < N, number.clamp(max=N - 1)
    past = x.new_zeros(N, S, P, dtype=torch.float32) if initial_state is None else initial_state.float()
    rows = torch.cat([past.reshape(N * S, P), x.reshape(B * T, P).float()])
    y: Any = 0.0 if bias is None else bias.float()
    for j in range(W):
        place = tokens - (S - j) - ends[number]
        y = y + rows[torch.where(place >= 0, N * S + tokens - (S - j), number * S + S + place)] * weight[:, j].float()
    y = torch.where(real[:, None], torch.nn.functional.silu(y) if activation else y, 0.0)
    place = (ends[1:] - ends[:-1])[:, None] + torch.arange(-S, 0, device=device)
    old = torch.arange(N, device=device)[:, None] * S + S + place
    return y.view(x.shape), rows[torch.where(place >= 0, N * S + ends[:-1, None] + place, old)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.activation, ctx.final = inputs[5:]


def _backward(ctx: Any, grad_y: torch.Tensor, grad_state: torch.Tensor) -> tuple[Any, ...]:
    *saved, cu_seqlens = ctx.saved_tensors
    if saved[0].numel() == 0:
        grads = [None if t is None else torch.zeros_like(t) for t in saved]
        if saved[3] is not None and ctx.final:
            grads[3] = grad_state
        return (*grads, None, None, None)

    def again(x: Any, weight: Any, bias: Any, initial_state: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        y, state = _plain(x, weight, bias, initial_state, cu_seqlens, ctx.activation)
        return [(y, grad_y), (state, grad_state)] if ctx.final else [(y, grad_y)]

    return (*gradients_again(again, saved, ctx.needs_input_grad[:4], materialize=True), None, None, None)


_causal_conv1d.register_autograd(_backward, setup_context=_setup_context)


@replayed
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Depthwise causal convolution along the tokens: y_t = silu(bias + sum_j weight[:, j] x_{t - (W-1) + j}).

    The last tap meets the current token, and what lies before a sequence is its initial state, or 0. Sums and SiLU are
    fp32; y is rounded once. This is the short convolution of Kimi Linear (arXiv 2510.26692, section 4).

    Args:
        x: [B, T, P], bf16, fp16 or fp32, last dim contiguous, the others of any stride, as of a slice of a fused projection.
        weight: [P, W] or [P, 1, W], W from 2 to 4, fp32 or x's dtype.
        bias: [P], of the weight's dtype.
        activation: "silu" (or "swish"), or None.
        initial_state: [N, W-1, P], the W-1 inputs before each sequence, oldest first; x's dtype or fp32. N is B, or the
            number of packed sequences. fla keeps [N, P, W] instead: this is its [..., 1:] with the last two dims swapped.
        output_final_state: returns the state after each sequence, in the initial state's dtype or else x's. A sequence of
            fewer than W-1 tokens keeps the younger part of its initial state.
        cu_seqlens: [N+1] int32 or int64, offsets of packed sequences, B = 1; inputs never cross from one to the next. On a
            GPU its numbers are not checked, and y is 0 in rows past the last.

    Returns:
        y [B, T, P], and the final state [N, W-1, P] or None. Differentiable; the backward pass is plain torch.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    check_rank("x", x, 3, "[B, T, P]", "x.unsqueeze(0) if x is [T, P]")
    check_contiguous_rows("x", x)
    taps = _check_weight(x, weight, bias)
    activated = _check_activation(activation)
    sequences = x.shape[0]
    if cu_seqlens is not None:
        sequences = check_offsets("cu_seqlens", cu_seqlens)
        check_same("cu_seqlens", cu_seqlens, "x", x, dtype=False)
        if x.shape[0] != 1:
            fail("cu_seqlens", f"packs all sequences in one row, but x has B = {x.shape[0]}", "flatten to [1, B*T, P]")
        if has_data(cu_seqlens):
            check_offset_values("cu_seqlens", cu_seqlens.tolist(), "x", x.shape[1])
    if initial_state is not None:
        _check_state("initial_state", initial_state, x, taps.shape[1])
        if initial_state.shape[0] != sequences:
            whose = "the batch has" if cu_seqlens is None else "cu_seqlens describes"
            have = f"holds {initial_state.shape[0]} states, but {whose} {sequences} sequences"
            fail("initial_state", have, "pass one state for every sequence, zeros for a new one")
    y, state = _causal_conv1d(x, taps, bias, initial_state, cu_seqlens, activated, output_final_state)
    return y, state if output_final_state else None


# Defined by schema: torch.library.custom_op costs some 80 us a call for an op that mutates an argument.
_library = torch.library.Library("k3dsl", "FRAGMENT")
_library.define(
    "causal_conv1d_update_(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? slots, Tensor? bias, bool activation)"
    " -> Tensor"
)


def _update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: bool,
) -> torch.Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    if conv_state.data_ptr() % ALIGNMENT:
        raise ArgumentError("conv_state: does not start at a multiple of 16 bytes", fix="allocate the pool on its own")
    (B, T, P), W = x.shape, weight.shape[1]
    tensors = {"x": x, "conv_state": conv_state, "weight": weight}
    if slots is not None:
        tensors["slots"] = slots
    if bias is not None:
        tensors["bias"] = bias
    options = {
        "dtype": x.dtype,
        "weight_dtype": weight.dtype,
        "bias": bias is not None,
        "activation": activation,
        "state": conv_state.dtype,
        "indexed": slots is not None,
    }
    return _call_update(tensors, {"B": (B,), "T": T, "P": P, "W": W, "pool": (conv_state.shape[0],)}, options)["y"]


for _key in ("CPU", "CUDA"):
    _library.impl("causal_conv1d_update_", _update, _key)


@torch.library.register_fake("k3dsl::causal_conv1d_update_")
def _(x, *rest):
    return x.new_empty(x.shape)


@replayed
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> torch.Tensor:
    """One token or a few of every request through `causal_conv1d`, with the state in place.

    Args:
        x: [B, P] or [B, Tq, P] with Tq up to 16; a new Tq compiles anew.
        conv_state: a pool [slots, W-1, P] of x's dtype or fp32: the last inputs of a request, oldest first. Changed in
            place. Slots may lie apart; the last dim is contiguous.
        weight, bias, activation: as `causal_conv1d`.
        slots: [B] int32, the slot of each request; a negative one is padding: its output is 0 and no slot changes. No two
            requests may share a slot. None: request b has slot b. Its numbers are checked on the CPU only.

    Returns:
        y in x's shape and dtype. Not differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("x", x)
    if x.dim() not in (2, 3):
        fail("x", f"has shape {list(x.shape)}, needs [B, P] or [B, Tq, P]", "one row a request")
    check_contiguous_rows("x", x)
    tokens = x if x.dim() == 3 else x[:, None]
    if not 1 <= tokens.shape[1] <= MAX_TOKENS:
        fail("x", f"has Tq = {tokens.shape[1]} tokens, needs 1 to {MAX_TOKENS}", "use causal_conv1d for more")
    taps = _check_weight(x, weight, bias)
    activated = _check_activation(activation)
    _check_state("conv_state", conv_state, x, taps.shape[1])
    check_slots("slots", slots, x.shape[0], "conv_state", conv_state.shape[0], x)
    check_no_grad("causal_conv1d_update", x, weight, bias, remedy="use torch.no_grad(), or causal_conv1d for training")
    call = torch.ops.k3dsl.causal_conv1d_update_
    return call(tokens, conv_state, taps, slots, bias, activated).view(x.shape)


def _check_weight(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Checks weight and bias; returns the weight as [P, W]."""
    channels = x.shape[-1]
    check_tensor("weight", weight)
    taps = weight.squeeze(1) if weight.dim() == 3 and weight.shape[1] == 1 else weight
    if taps.dim() != 2 or taps.shape[0] != channels or taps.shape[1] not in WIDTHS:
        need = f"needs [P, W] or [P, 1, W] with P = {channels} and W from {WIDTHS[0]} to {WIDTHS[-1]}"
        fail(
            "weight",
            f"has shape {list(weight.shape)}, {need}",
            "one row of taps a channel, the last for the current token",
        )
    for name, w in (("weight", weight), ("bias", bias)):
        if w is None:
            continue
        check_tensor(name, w)
        check_same(name, w, "x", x, dtype=False)
        if w.dtype not in (x.dtype, torch.float32):
            fail(
                name, f"is {dtype_name(w.dtype)}, x is {dtype_name(x.dtype)}", f"{name}.float(), or {name}.to(x.dtype)"
            )
    if bias is not None:
        if bias.shape != (channels,):
            fail("bias", f"has shape {list(bias.shape)}, needs [P] = [{channels}]", "one number a channel")
        check_same("bias", bias, "weight", weight)
    return taps


def _check_activation(activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        fail("activation", f"is {activation!r}", 'pass "silu", or None for none')
    return activation is not None


def _check_state(name: str, state: torch.Tensor, x: torch.Tensor, width: int) -> None:
    check_tensor(name, state)
    channels = x.shape[-1]
    if state.dim() != 3 or state.shape[1:] != (width - 1, channels):
        need = f"needs [., W-1, P] = [., {width - 1}, {channels}]"
        swapped = state.dim() == 3 and state.shape[1] == channels
        remedy = (
            "a state of fla is [N, P, W]: state[..., 1:].transpose(1, 2).contiguous()" if swapped else "oldest first"
        )
        fail(name, f"has shape {list(state.shape)}, {need}", remedy)
    if state.dtype not in (x.dtype, torch.float32):
        fail(name, f"is {dtype_name(state.dtype)}, needs x's {dtype_name(x.dtype)} or float32", f"{name}.to(x.dtype)")
    check_same(name, state, "x", x, dtype=False)
    check_contiguous_rows(name, state)


__all__ = ["causal_conv1d", "causal_conv1d_update"]
