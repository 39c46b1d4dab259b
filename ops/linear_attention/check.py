"""Checks of what a user hands to linear attention and the delta rules: shapes, dtypes, devices, strides, offsets."""

from __future__ import annotations

import math

import torch

from k3dsl.ops.common import (
    check_contiguous_rows,
    check_offset_values,
    check_offsets,
    check_rank,
    check_same,
    check_tensor,
    check_width,
    fail,
    has_data,
)

STATES = (torch.float32, torch.bfloat16)
MAX_WIDTH = 256


def check_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rates: dict[str, torch.Tensor | None], scale: float | None
) -> tuple[int, int, int, int]:
    """Checks the per-token tensors against each other. rates: g and beta, each [B, T, HV], where the op has them.

    q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H; K and V multiples of 16 up to 256. Returns HV, H, K, V.
    Raises ArgumentError, naming the argument, the reason and the remedy.
    """
    for name, x, dims in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        check_tensor(name, x)
        check_rank(name, x, 4, dims, f"{name} as {dims}")
        check_same(name, x, "q", q)
        check_contiguous_rows(name, x)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if k.shape != q.shape:
        fail("k", f"has shape {list(k.shape)}, q has {list(q.shape)}", "pass one key a query")
    if v.shape[:2] != q.shape[:2]:
        fail("v", f"has shape {list(v.shape)}, needs [B, T, HV, V] with B = {B}, T = {T} of q", "one value a key")
    if H == 0 or HV == 0 or HV % H:
        fail("v", f"has HV = {HV} heads, not a multiple of q's H = {H}", "repeat or drop heads")
    for name, width, dim in (("q", K, "K"), ("v", V, "V")):
        check_width(name, dim, width, MAX_WIDTH)
    for name, rate in rates.items():
        check_tensor(name, rate)
        assert rate is not None
        if rate.shape != (B, T, HV):
            fail(name, f"has shape {list(rate.shape)}, needs [B, T, HV] = {[B, T, HV]}", "one number a value head")
        check_same(name, rate, "q", q, dtype=False)
    if scale is not None and not math.isfinite(scale):
        fail("scale", f"is {scale}", "pass a finite number, or None for 1/sqrt(K)")
    return HV, H, K, V


def check_sequences(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None = None
) -> int:
    """Checks the offsets of packed sequences; the number of sequences. Numbers are read where they lie on the CPU."""
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        fail("cu_seqlens_cpu", "is given without cu_seqlens", "pass both, or neither")
    if cu_seqlens is None:
        return q.shape[0]
    count = check_offsets("cu_seqlens", cu_seqlens)
    check_same("cu_seqlens", cu_seqlens, "q", q, dtype=False)
    if q.shape[0] != 1:
        fail("cu_seqlens", f"packs all sequences in one row, but q has B = {q.shape[0]}", "flatten to [1, B*T, ...]")
    host = cu_seqlens
    if cu_seqlens_cpu is not None:
        check_offsets("cu_seqlens_cpu", cu_seqlens_cpu)
        if cu_seqlens_cpu.device.type != "cpu" or cu_seqlens_cpu.shape != cu_seqlens.shape:
            fail(
                "cu_seqlens_cpu", "is no copy of cu_seqlens on the CPU", "keep the numbers where the lengths are known"
            )
        host = cu_seqlens_cpu
    if has_data(host):
        check_offset_values("cu_seqlens", host.tolist(), "q", q.shape[1])
    return count


def check_state(
    name: str, state: torch.Tensor, q: torch.Tensor, count: int | None, inner: tuple[int, int, int], v_first: bool
) -> None:
    """Checks states [N, HV, K, V], or [N, HV, V, K] with v_first; inner: HV, K, V. count: N, or None for any."""
    HV, K, V = inner
    shape = [HV, V, K] if v_first else [HV, K, V]
    check_tensor(name, state, STATES)
    if state.dim() != 4 or list(state.shape[1:]) != shape:
        order = "[., HV, V, K]" if v_first else "[., HV, K, V]"
        remedy = f"state_v_first={v_first} means {order}"
        fail(name, f"has shape {list(state.shape)}, needs [., {', '.join(map(str, shape))}]", remedy)
    if count is not None and state.shape[0] != count:
        fail(name, f"holds {state.shape[0]} states for {count} sequences", "pass one state for every sequence")
    check_same(name, state, "q", q, dtype=False)
    check_contiguous_rows(name, state)


def check_one_token(q: torch.Tensor) -> None:
    """Checks that there is one token a request."""
    if isinstance(q, torch.Tensor) and q.dim() == 4 and q.shape[1] != 1:
        fail("q", f"has T = {q.shape[1]} tokens, decode takes 1", "use the forward function for several tokens")


def check_pool(state: torch.Tensor) -> None:
    """Checks that slots are contiguous."""
    if not state[:1].is_contiguous():
        fail("state", f"has strides {state.stride()}, but a slot must be contiguous", "lay the pool out as [S, ...]")
