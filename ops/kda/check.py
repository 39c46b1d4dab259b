"""Checks of what a user hands to KDA: shapes, dtypes, devices, strides, and numbers that no kernel can make sense of."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from k3dsl.ops.common import (
    check_contiguous_rows,
    check_is_tensor,
    check_offset_values,
    check_offsets,
    check_rank,
    check_same,
    check_slots,
    dtype_name,
    fail,
    has_data,
    is_width,
)

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)
KEY_WIDTHS = (64, 128)
MAX_VALUE_WIDTH = 256


class Shapes(NamedTuple):
    """The dims of a call: B batch, T tokens, H query/key heads, HV value heads, K and V widths, N sequences."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


class DecodeShapes(NamedTuple):
    """The dims of a decode call: B requests, H query/key heads, HV value heads, K and V widths, S slots of the pool."""

    B: int
    H: int
    HV: int
    K: int
    V: int
    S: int


def check_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> Shapes:
    """Checks the arguments of the forward function and returns their dims. Never waits for a GPU.

    Args:
        q, k: [B, T, H, K], K 64 or 128. v: [B, T, HV, V], V a multiple of 16 up to 256, HV a multiple of H.
            All three bfloat16, float16 or float32 alike; the last dim contiguous, the others of any stride.
        g: [B, T, HV, K], of q's dtype or float32, last dim contiguous. beta: [B, T, HV], any float dtype and strides.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``; float32 or bfloat16, last dim contiguous.
        A_log: HV floats; dt_bias: HV*K floats. Both of the gate of ``use_gate_in_kernel``.
        cu_seqlens: [N+1] int32 or int64 on q's device, then B must be 1. Its numbers (from 0, never down, to T) are
            checked if it lies on the CPU, or in ``cu_seqlens_cpu``, the same numbers on the CPU.

    Raises:
        ArgumentError: naming the argument, what is wrong with it and the remedy.
    """
    _check_tensors(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias)
    check_rank("q", q, 4, "[B, T, H, K]", "[1, T, H, K] for packed sequences")
    batch, tokens = q.shape[:2]
    heads, value_heads, width, value_width = _check_tokens(q, k, v, g, beta)
    _check_numbers(scale, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    _check_gate(q, value_heads, width, use_gate_in_kernel, lower_bound, A_log, dt_bias)

    sequences = batch
    if cu_seqlens is not None:
        sequences = check_offsets("cu_seqlens", cu_seqlens)
        check_same("cu_seqlens", cu_seqlens, "q", q, dtype=False)
        if batch != 1:
            fail("cu_seqlens", f"packs all sequences in one row, but q has B = {batch}", "flatten to [1, B*T, ...]")
    if cu_seqlens_cpu is not None:
        _check_host_copy(cu_seqlens, cu_seqlens_cpu)
    host = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if host is not None and has_data(host):
        check_offset_values("cu_seqlens", host.tolist(), "q", tokens)

    if initial_state is not None:
        _check_state("initial_state", initial_state, q, (value_heads, width, value_width), state_v_first)
        check_contiguous_rows("initial_state", initial_state)
        if initial_state.shape[0] != sequences:
            whose = "cu_seqlens describes" if cu_seqlens is not None else "the batch has"
            fail(
                "initial_state",
                f"holds {initial_state.shape[0]} states, but {whose} {sequences} sequences",
                "pass one state for every sequence, zeros for a new one",
            )
    return Shapes(batch, tokens, heads, value_heads, width, value_width, sequences)


def check_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    scale: float | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> DecodeShapes:
    """Checks the arguments of the one-token function and returns their dims. Never waits for a GPU.

    Args:
        q, k, v, g, beta and the rest: as `check_forward`, with T = 1 and one row of the batch a request.
        state: the pool, [S, HV, K, V] or [S, HV, V, K] with ``state_v_first``; float32 or bfloat16. Slots may lie
            apart, a slot itself is contiguous.
        state_indices: [B] int32, the slot of each request; a negative one is padding, whose state is left alone. No two
            requests may share a slot. None: request b has slot b, and S is B. Its numbers are checked on the CPU only.

    Raises:
        ArgumentError: naming the argument, what is wrong with it and the remedy.
    """
    _check_tensors(q=q, k=k, v=v, g=g, beta=beta, state=state, A_log=A_log, dt_bias=dt_bias)
    check_rank("q", q, 4, "[B, 1, H, K]", "q.unsqueeze(1) if q is [B, H, K]")
    batch, tokens = q.shape[:2]
    if tokens != 1:
        fail("q", f"has T = {tokens} tokens, decode takes 1", "use the forward function for several tokens")
    heads, value_heads, width, value_width = _check_tokens(q, k, v, g, beta)
    _check_numbers(scale, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    _check_gate(q, value_heads, width, use_gate_in_kernel, lower_bound, A_log, dt_bias)

    _check_state("state", state, q, (value_heads, width, value_width), state_v_first)
    if not state[:1].is_contiguous():
        fail("state", f"has strides {state.stride()}, but a slot must be contiguous", "lay the pool out as [S, ...]")
    slots = state.shape[0]
    check_slots("state_indices", state_indices, batch, "state", slots, q)
    return DecodeShapes(batch, heads, value_heads, width, value_width, slots)


def _check_tensors(**given: object) -> None:
    for name, x in given.items():
        if x is not None or name not in ("initial_state", "A_log", "dt_bias"):
            check_is_tensor(name, x)


def _check_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[int, int, int, int]:
    """Checks the five per-token tensors against each other; q has four dims. Returns H, HV, K, V."""
    batch, tokens, heads, width = q.shape
    check_rank("k", k, 4, "[B, T, H, K]", "k in q's shape")
    check_rank("v", v, 4, "[B, T, HV, V]", "v with a dim for heads and one for values")
    value_heads, value_width = v.shape[-2:]
    wanted = {
        "k": (k, q.shape, "[B, T, H, K], the shape of q"),
        "v": (v, (batch, tokens, value_heads, value_width), "[B, T, HV, V]"),
        "g": (g, (batch, tokens, value_heads, width), "[B, T, HV, K]"),
        "beta": (beta, (batch, tokens, value_heads), "[B, T, HV]"),
    }
    for name, (x, shape, dims) in wanted.items():
        if x.shape != shape:
            have, need = list(x.shape), list(shape)
            fail(name, f"has shape {have}, needs {need}", f"B, T, H and K come from q, HV and V from v: {dims}")
    if heads == 0 or value_heads == 0 or value_heads % heads:
        fail(
            "v",
            f"has HV = {value_heads} heads, not a multiple of q's H = {heads}",
            "each query/key head serves HV / H value heads; repeat or drop heads",
        )
    if width not in KEY_WIDTHS:
        fail("q", f"has K = {width}, supported are {', '.join(map(str, KEY_WIDTHS))}", "pad the head dim with zeros")
    if not is_width(value_width, MAX_VALUE_WIDTH):
        fail("v", f"has V = {value_width}, needs a multiple of 16 up to {MAX_VALUE_WIDTH}", "pad v with zeros")

    if q.dtype not in INPUT_DTYPES:
        fail("q", f"is {dtype_name(q.dtype)}, needs bfloat16, float16 or float32", "q.to(torch.bfloat16)")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            fail(name, f"is {dtype_name(x.dtype)}, q is {dtype_name(q.dtype)}", f"{name}.to(q.dtype)")
    if g.dtype not in (q.dtype, torch.float32):
        fail("g", f"is {dtype_name(g.dtype)}, needs q's {dtype_name(q.dtype)} or float32", "g.float()")
    if not beta.dtype.is_floating_point:
        fail("beta", f"is {dtype_name(beta.dtype)}, needs a float dtype", "beta.float()")
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_same(name, x, "q", q, dtype=False)
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        check_contiguous_rows(name, x)
    return heads, value_heads, width, value_width


def _check_numbers(
    scale: float | None, lower_bound: float | None, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool
) -> None:
    if scale is not None and (not isinstance(scale, (int, float)) or not math.isfinite(scale)):
        fail("scale", f"is {scale!r}", "pass a finite number, float(scale) of a tensor, or None for 1/sqrt(K)")
    if lower_bound is not None and (not isinstance(lower_bound, (int, float)) or not -math.inf < lower_bound < 0):
        fail(
            "lower_bound",
            f"is {lower_bound}, needs to be a finite number below 0 (nats a token)",
            "-5.0 for Kimi K3, None for the softplus gate",
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        fail(
            "allow_neg_eigval",
            "doubles the sigmoid of beta, which is not asked for",
            "set use_beta_sigmoid_in_kernel, or pass beta doubled",
        )


def _check_gate(
    q: torch.Tensor,
    value_heads: int,
    width: int,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> None:
    if not use_gate_in_kernel:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                fail(
                    name,
                    "is of a gate that is not asked for",
                    "set use_gate_in_kernel=True, or leave it out",
                )
        return
    if A_log is None and lower_bound is None:
        fail("A_log", "is missing; the softplus gate needs it", "pass A_log [HV], or lower_bound for the bounded gate")
    wanted = {
        "A_log": (A_log, value_heads, "HV", "drop the padding of a checkpoint, A_log[:HV]"),
        "dt_bias": (dt_bias, value_heads * width, "HV*K", "one number a channel of every value head"),
    }
    for name, (x, count, dims, remedy) in wanted.items():
        if x is None:
            continue
        if x.numel() != count:
            fail(name, f"has shape {list(x.shape)}, needs {dims} = {count} numbers", remedy)
        if not x.dtype.is_floating_point:
            fail(name, f"is {dtype_name(x.dtype)}, needs a float dtype", f"{name}.float()")
        check_same(name, x, "q", q, dtype=False)


def _check_state(name: str, x: torch.Tensor, q: torch.Tensor, dims: tuple[int, int, int], v_first: bool) -> None:
    heads, width, value_width = dims
    layout, other = ("[., HV, V, K]", "[., HV, K, V]")[:: 1 if v_first else -1]
    inner = [heads, value_width, width] if v_first else [heads, width, value_width]
    check_rank(name, x, 4, layout, "one state [HV, K, V] a sequence or slot")
    have = list(x.shape[1:])
    if have != inner:
        swapped = have == [inner[0], inner[2], inner[1]]
        flag = f"state_v_first={not v_first}"
        remedy = f"this is {other}: pass {flag}" if swapped else f"state_v_first={v_first} means {layout}"
        fail(name, f"has shape {list(x.shape)}, needs [., {', '.join(map(str, inner))}]", remedy)
    if x.dtype not in STATE_DTYPES:
        fail(name, f"is {dtype_name(x.dtype)}, needs float32 or bfloat16", f"{name}.float()")
    check_same(name, x, "q", q, dtype=False)


def _check_host_copy(cu_seqlens: torch.Tensor | None, copy: torch.Tensor) -> None:
    if cu_seqlens is None:
        fail("cu_seqlens_cpu", "is given without cu_seqlens", "pass both, or neither")
    check_offsets("cu_seqlens_cpu", copy)
    if copy.device.type != "cpu":
        fail("cu_seqlens_cpu", f"is on {copy.device}", "cu_seqlens_cpu.cpu(), made where the lengths are known")
    if copy.shape != cu_seqlens.shape:
        have, need = list(copy.shape), list(cu_seqlens.shape)
        fail("cu_seqlens_cpu", f"has shape {have}, cu_seqlens has {need}", "pass the same numbers in both")
