"""attention on torch tensors: checks, launch, registration with torch.library."""

from __future__ import annotations

import math
from typing import Any

import torch

from k3dsl.ops.attention.decode_space import ATTENTION_DECODE
from k3dsl.ops.attention.space import ATTENTION, MAX_WIDTH
from k3dsl.ops.common import (
    Caller,
    check_contiguous_rows,
    check_no_grad,
    check_numbers,
    check_rank,
    check_same,
    check_tensor,
    check_width,
    fail,
)
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.replay import replayed

_call = Caller(ATTENTION)
_decode = Caller(ATTENTION_DECODE)
_PRECISIONS = ("ieee", "tf32x3", "tf32")


@torch_op("attention")
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    (B, T, H, D), (S, HK, V) = q.shape, v.shape[1:]
    if B * T * H * S == 0:  # no key: the sum over nothing
        lse = q.new_full((B, H, T) if return_lse else (0,), -math.inf, dtype=torch.float32)
        return q.new_zeros((B, T, H, V)), lse
    dims = {"B": 1 if B == 1 else (B,), "T": (T, 128), "S": (S, 128), "H": H, "HK": HK, "D": D, "V": V}
    options = {"dtype": q.dtype, "causal": causal, "scale": scale, "lse": return_lse, "precision": precision}
    out = _call({"q": q, "k": k, "v": v}, dims, options)
    return out["o"], out["lse"] if return_lse else q.new_empty(0, dtype=torch.float32)


@_attention.register_fake
def _(q, k, v, causal, scale, return_lse, precision):
    B, T, H, _ = q.shape
    lse = q.new_empty((B, H, T) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((B, T, H, v.shape[-1])), lse


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.causal, ctx.scale = inputs[3:5]


def _backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    """Computes the scores again in plain torch and differentiates that."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        o, lse = _plain(q, k, v, ctx.causal, ctx.scale)
        outputs, grads = [o], [grad.to(o.dtype)]
        if grad_lse is not None and grad_lse.numel():
            outputs.append(lse)
            grads.append(grad_lse.to(lse.dtype))
        found = torch.autograd.grad(outputs, (q, k, v), grads)
    return (*found, None, None, None, None)


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    T, H, D = q.shape[1:]
    S = k.shape[1]
    k, v = (x.float().repeat_interleave(H // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.float(), k) * (D**-0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1), -math.inf)
    return torch.einsum("bhts,bshv->bthv", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


_attention.register_autograd(_backward, setup_context=_setup_context)


@replayed
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    precision: str = "ieee",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v, without ever storing the scores.

    Args:
        q: [B, T, H, D]. k: [B, S, HK, D]. v: [B, S, HK, V]. bf16, fp16 or fp32; H a multiple of HK (grouped-query
            attention); D and V multiples of 16 up to 256. Any strides, last dim contiguous: a view [B, H, T, D].transpose(1, 2)
            costs no copy.
        causal: query i sees keys up to i + S - T (the last query sees all), so S is at least T.
        scale: of the scores, positive; 1/sqrt(D) by default. A new value compiles anew.
        return_lse: also returns the natural log of the softmax's denominator.
        precision: how fp32 products are formed, 'ieee', 'tf32x3' or 'tf32'; nothing to 16-bit inputs.

    Returns:
        o [B, T, H, V] in q's dtype, or (o, lse [B, H, T] fp32). Differentiable; the backward pass is plain torch: right, but
        slow, and it stores the scores.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    T, S = _check_heads(q, k, v, "k", "v")
    if causal and S < T:
        fail("k", f"has S = {S} keys for T = {T} queries", "a causal mask needs S of at least T; or causal=False")
    _check_numbers(scale, precision)
    o, lse = _attention(q, k, v, causal, None if scale is None else float(scale), return_lse, precision)
    return (o, lse) if return_lse else o


@torch.library.custom_op("k3dsl::attention_decode", mutates_args=())
def _attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    scale: float | None,
    return_lse: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    (B, T, H, D), (S, HK, V) = q.shape, v_cache.shape[1:]
    if B * T * S == 0:  # no key: the sum over nothing
        lse = q.new_full((B, H, T) if return_lse else (0,), -math.inf, dtype=torch.float32)
        return q.new_zeros((B, T, H, V)), lse
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    dims = {"B": (B,), "T": 1 if T == 1 else (T,), "S": (S, 128), "H": H, "HK": HK, "D": D, "V": V}
    options = {"dtype": q.dtype, "scale": scale, "lse": return_lse, "precision": precision}
    out = _decode(tensors, dims, options)
    return out["o"], out["lse"] if return_lse else q.new_empty(0, dtype=torch.float32)


@_attention_decode.register_fake
def _(q, k_cache, v_cache, cache_seqlens, scale, return_lse, precision):
    B, T, H, _ = q.shape
    lse = q.new_empty((B, H, T) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((B, T, H, v_cache.shape[-1])), lse


@replayed
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    precision: str = "ieee",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention of each request's last T tokens against its cache; for decoding and for prefill in parts.

    Args:
        q: [B, T, H, D]. k_cache: [B, S, HK, D]. v_cache: [B, S, HK, V], the keys and values of the T tokens already in
            them. Dtypes, widths and strides: as `attention`.
        cache_seqlens: [B] int32, how many slots of a request's cache are filled, the T tokens included. What lies in the
            others is never looked at. Query i of a request with n filled slots sees those up to i + n - T; one that sees none
            (an empty cache, or n less than T) has output 0. Its numbers are checked where it lies on the CPU.
        scale, return_lse, precision: as `attention`; the log-sum-exp of a query without keys is -inf.

    Returns:
        o [B, T, H, V] in q's dtype, or (o, lse [B, H, T] fp32). Not differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    _, S = _check_heads(q, k_cache, v_cache, "k_cache", "v_cache")
    check_tensor("cache_seqlens", cache_seqlens, (torch.int32,))
    if cache_seqlens.shape != q.shape[:1]:
        fail(
            "cache_seqlens", f"has shape {list(cache_seqlens.shape)}, needs [B] = [{q.shape[0]}]", "a length a request"
        )
    check_same("cache_seqlens", cache_seqlens, "q", q, dtype=False)
    check_contiguous_rows("cache_seqlens", cache_seqlens)
    check_numbers(_check_filled, cache_seqlens, S)
    _check_numbers(scale, precision)
    scale = None if scale is None else float(scale)
    check_no_grad("attention_decode", q, k_cache, v_cache, remedy="use torch.no_grad(), or attention for training")
    o, lse = torch.ops.k3dsl.attention_decode(q, k_cache, v_cache, cache_seqlens, scale, return_lse, precision)
    return (o, lse) if return_lse else o


def _check_filled(cache_seqlens: torch.Tensor, S: int) -> None:
    for b, n in enumerate(cache_seqlens.tolist()):
        if not 0 <= n <= S:
            fail("cache_seqlens", f"is {n} for request {b}, the cache has {S} slots", "count filled slots")


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, value: str) -> tuple[int, int]:
    """Checks queries, keys and values, by their names, against each other. Returns T and S."""
    for name, x, dims in (("q", q, "[B, T, H, D]"), (key, k, "[B, S, HK, D]"), (value, v, "[B, S, HK, V]")):
        check_tensor(name, x)
        check_rank(name, x, 4, dims, f"{name} as {dims}")
        check_contiguous_rows(name, x)
        check_same(name, x, "q", q)
    B, T, H, D = q.shape
    S, HK, V = v.shape[1:]
    if k.shape[0] != B or k.shape[3] != D:
        fail(
            key, f"has shape {list(k.shape)}, needs [B, S, HK, D] with B = {B}, D = {D} of q", "pass keys as wide as q"
        )
    if v.shape[:3] != k.shape[:3]:
        reason = f"has shape {list(v.shape)}, needs [B, S, HK, V] with {list(k.shape[:3])} of {key}"
        fail(value, reason, "one value a key")
    if HK == 0 or H % HK:
        fail(key, f"has HK = {HK} heads, of which q's H = {H} is no multiple", "repeat or drop heads")
    for name, width, dim in (("q", D, "D"), (value, V, "V")):
        check_width(name, dim, width, MAX_WIDTH)
    return T, S


def _check_numbers(scale: float | None, precision: str) -> None:
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and 0 < scale < math.inf):
        fail("scale", f"is {scale!r}", "pass a positive finite number, or None for 1/sqrt(D)")
    if precision not in _PRECISIONS:
        fail("precision", f"is {precision!r}", f"one of {', '.join(_PRECISIONS)}")
