"""Checks of what a user hands to the KDA step: shapes, dtypes, devices, strides, slots."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from k3dsl.ops.causal_conv1d.space import WIDTHS
from k3dsl.ops.common import (
    check_contiguous_rows,
    check_rank,
    check_same,
    check_slots,
    check_tensor,
    dtype_name,
    fail,
    is_width,
)
from k3dsl.ops.kda.check import KEY_WIDTHS, STATE_DTYPES
from k3dsl.ops.kda_step.space import MAX_TOKENS, MAX_VALUE_WIDTH
from k3dsl.runtime.dispatch import ALIGNMENT

QKV = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | list[torch.Tensor]


class Shapes(NamedTuple):
    """The dims of a call: B requests, T tokens of each, H heads, K and V widths, C = H (2 K + V) channels, W taps."""

    B: int
    T: int
    H: int
    K: int
    V: int
    C: int
    W: int


def check_step(
    qkv: QKV,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor | None,
    *,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    scale: float | None,
    norm_eps: float,
    gate_activation: str,
    state_v_first: bool,
) -> tuple[list[torch.Tensor], torch.Tensor, Shapes]:
    """Checks the arguments of `kda_step`; returns q, k, v as [B, T, H, .], the taps as [C, W] and the dims.

    Raises:
        ArgumentError: naming the argument, what is wrong with it and the remedy.
    """
    check_tensor("g", g)
    check_rank("g", g, 4, "[B, Tq, H, K]", "f.unflatten(-1, (H, K)), one decay logit a key channel")
    check_tensor("output_gate", output_gate)
    check_rank("output_gate", output_gate, 4, "[B, Tq, H, V]", "G.unflatten(-1, (H, V))")
    (B, T, H, K), V = g.shape, output_gate.shape[-1]
    _check_widths(T, K, V)
    parts = _split(qkv, B, T, H, K, V)
    q, channels = parts[0], H * (2 * K + V)
    _check_shape("output_gate", output_gate, (B, T, H, V), "[B, Tq, H, V], B, Tq and H from g")
    check_tensor("beta", beta)
    _check_shape("beta", beta, (B, T, H), "[B, Tq, H], one logit a head")
    check_tensor("conv_weight", conv_weight)
    taps = conv_weight.squeeze(1) if conv_weight.dim() == 3 and conv_weight.shape[1] == 1 else conv_weight
    if taps.dim() != 2 or taps.shape[0] != channels or taps.shape[1] not in WIDTHS:
        need = f"[C, W] or [C, 1, W] with C = 2 H K + H V = {channels} and W from 2 to 4"
        remedy = "torch.cat([q_conv, k_conv, v_conv]), once at loading"
        fail("conv_weight", f"has shape {list(conv_weight.shape)}, needs {need}", remedy)
    shapes = Shapes(B, T, H, K, V, channels, taps.shape[1])
    counts = {"A_log": (A_log, H, "H"), "norm_weight": (norm_weight, V, "V")}
    if dt_bias is not None:
        counts["dt_bias"] = (dt_bias, H * K, "H*K")
    for name, (x, count, dims) in counts.items():
        check_tensor(name, x)
        if x.numel() != count:
            remedy = "drop the padding of a checkpoint, A_log[:H]" if name == "A_log" else f"{dims} numbers"
            fail(name, f"has shape {list(x.shape)}, needs {dims} = {count} numbers", remedy)
    for name, x in (("output_gate", output_gate), ("conv_weight", taps), ("g", g)):
        if x.dtype not in (q.dtype, torch.float32):
            fail(name, f"is {dtype_name(x.dtype)}, needs q's {dtype_name(q.dtype)} or float32", f"{name}.float()")
    tensors = {
        "g": g, "beta": beta, "output_gate": output_gate, "conv_weight": taps, "state": state, "conv_state": conv_state,
        **{name: x for name, (x, _, _) in counts.items()},
    }  # fmt: skip
    for name, x in tensors.items():
        check_same(name, x, "qkv", q, dtype=False)
    for name in ("g", "output_gate"):
        check_contiguous_rows(name, tensors[name])
    _check_pools(state, conv_state, q, shapes, state_v_first)
    check_slots("slots", slots, B, "state", state.shape[0], q)
    _check_numbers(lower_bound, scale, norm_eps, gate_activation)
    return parts, taps, shapes


def _split(qkv: QKV, B: int, T: int, H: int, K: int, V: int) -> list[torch.Tensor]:
    """q, k and v as [B, T, H, K] or [B, T, H, V] views."""
    sizes = [H * K, H * K, H * V]
    if isinstance(qkv, torch.Tensor):
        check_tensor("qkv", qkv)
        need = f"[B, Tq, 2 H K + H V] = [{B}, {T}, {sum(sizes)}]"
        if qkv.shape != (B, T, sum(sizes)):
            fail("qkv", f"has shape {list(qkv.shape)}, needs {need}", "q, k and v side by side, or pass (q, k, v)")
        named = [("qkv", part) for part in qkv.split(sizes, -1)]
    else:
        if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
            fail("qkv", f"is a {type(qkv).__name__}", "pass one tensor, or three: (q, k, v)")
        named = list(zip("qkv", qkv, strict=True))
    parts = []
    for (name, x), width in zip(named, (K, K, V), strict=True):
        check_tensor(name, x)
        flat = x.dim() == 3 and x.shape == (B, T, H * width)
        if not flat and x.shape != (B, T, H, width):
            need = f"[{B}, {T}, {H * width}] or [{B}, {T}, {H}, {width}]"
            fail(name, f"has shape {list(x.shape)}, needs {need}", "B, Tq, H and K come from g, V from output_gate")
        check_same(name, x, named[0][0], named[0][1])
        check_contiguous_rows(name, x)
        parts.append(x.unflatten(-1, (H, width)) if flat else x)
    return parts


def _check_widths(T: int, K: int, V: int) -> None:
    if not 1 <= T <= MAX_TOKENS:
        fail("g", f"has Tq = {T} tokens, needs 1 to {MAX_TOKENS}", "use kda for more, with causal_conv1d before it")
    if K not in KEY_WIDTHS:
        fail("g", f"has K = {K}, supported are {', '.join(map(str, KEY_WIDTHS))}", "pad the head dim with zeros")
    if not is_width(V, MAX_VALUE_WIDTH):
        fail("output_gate", f"has V = {V}, needs a multiple of 16 up to {MAX_VALUE_WIDTH}", "use the three ops")


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], dims: str) -> None:
    if x.shape != shape:
        fail(name, f"has shape {list(x.shape)}, needs {list(shape)}", dims)


def _check_pools(state: torch.Tensor, conv_state: torch.Tensor, q: torch.Tensor, d: Shapes, v_first: bool) -> None:
    check_tensor("state", state, STATE_DTYPES)
    inner = (d.H, d.V, d.K) if v_first else (d.H, d.K, d.V)
    if state.shape[1:] != inner:
        layout = "[slots, H, V, K]" if v_first else "[slots, H, K, V]"
        fail("state", f"has shape {list(state.shape)}, needs [., {', '.join(map(str, inner))}]", f"a pool {layout}")
    check_tensor("conv_state", conv_state)
    if conv_state.dim() != 3 or conv_state.shape[1:] != (d.W - 1, d.C):
        need = f"[slots, W-1, C] = [., {d.W - 1}, {d.C}]"
        remedy = "the last W-1 inputs of q, k and v side by side"
        fail("conv_state", f"has shape {list(conv_state.shape)}, needs {need}", remedy)
    if conv_state.dtype not in (q.dtype, torch.float32):
        have = dtype_name(conv_state.dtype)
        fail("conv_state", f"is {have}, needs q's {dtype_name(q.dtype)} or float32", "conv_state.to(q.dtype)")
    if conv_state.shape[0] != state.shape[0]:
        have = f"has {conv_state.shape[0]} slots, state has {state.shape[0]}"
        fail("conv_state", have, "one slot number stands for both pools")
    for name, pool in (("state", state), ("conv_state", conv_state)):
        check_pool(name, pool)


def check_pool(name: str, pool: torch.Tensor) -> None:
    """Raises ArgumentError unless each slot is contiguous and the pool starts where generated code can address it."""
    if not pool[:1].is_contiguous():
        fail(name, f"has strides {pool.stride()}, but a slot must be contiguous", "lay the pool out as [slots, ...]")
    real = not isinstance(pool, torch._subclasses.FakeTensor) and not torch.compiler.is_compiling()
    if real and pool.data_ptr() % ALIGNMENT:
        fail(name, "does not start at a multiple of 16 bytes", "allocate the pool on its own")


def _check_numbers(lower_bound: float | None, scale: float | None, norm_eps: float, gate_activation: str) -> None:
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        remedy = "-5.0 for Kimi K3, None for the softplus gate of Kimi Linear"
        fail("lower_bound", f"is {lower_bound}, needs to be a finite number below 0 (nats a token)", remedy)
    if scale is not None and not math.isfinite(scale):
        fail("scale", f"is {scale}", "pass a finite number, or None for 1/sqrt(K)")
    if not 0 <= norm_eps < math.inf:
        fail("norm_eps", f"is {norm_eps}", "pass a finite number of at least 0")
    if gate_activation not in ("sigmoid", "silu"):
        fail("gate_activation", f"is {gate_activation!r}", 'pass "sigmoid" or "silu"')
