"""The MLA ops on torch tensors: code by kind of call, launches, registration with torch.library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import from_torch
from k3dsl.ir.symbols import Sym
from k3dsl.ops.common import Caller, check_no_grad, check_tensor, fail, gradients_again, size_class
from k3dsl.ops.mla import check, plain
from k3dsl.ops.mla.space import CACHE_WRITE, DECODE, PREFILL
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.dispatch import Dispatcher, Problem, aligned, remembered, strides_of, wanted_backend
from k3dsl.runtime.executable import Executable
from k3dsl.runtime.op import Op, forced_key
from k3dsl.runtime.replay import replayed

Items = tuple[tuple[str, Any], ...]


class Chooser:
    """The compiled plan of an op for a kind of call with the knobs that it has, compiled on first use."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self._dispatch = Dispatcher(op.plan)
        self._remembered = remembered(self._pick)

    def __call__(
        self,
        numbers: Mapping[str, int],
        known: Mapping[str, int | Sym],
        options: Mapping[str, Any],
        strides: Mapping[str, Any],
        device: torch.device,
    ) -> tuple[Executable, Mapping[str, Any]]:
        """numbers: the op's dims. known: the plan's. options: torch dtypes become k3dsl's."""
        parts = (tuple(x.items()) for x in (numbers, known, options, strides))
        return self._remembered(*parts, device, wanted_backend(device), forced_key(self.op))

    def _pick(
        self, numbers: Items, known: Items, options: Items, strides: Items, device: torch.device, backend: str, _: Any
    ) -> tuple[Executable, Mapping[str, Any]]:
        chosen = self.op.resolve_options({n: from_torch(x) if isinstance(x, torch.dtype) else x for n, x in options})
        return self._dispatch.pick(Problem(self.op, chosen, dict(numbers), dict(known), dict(strides), device, backend))


_choose_prefill, _choose_decode, _write = Chooser(PREFILL), Chooser(DECODE), Caller(CACHE_WRITE)


# ---- prefill -------------------------------------------------------------------------------------------------------------


def _halves(k_nope: torch.Tensor, v: torch.Tensor) -> bool:
    """True when k_nope and v have the strides of the halves of one contiguous [B, S, H, D+V]."""
    _, S, H, D = k_nope.shape
    row = D + v.shape[-1]
    strides = (S * H * row, H * row, row, 1)
    return all(
        n == 1 or (a == s and b == s)
        for n, a, b, s in zip(k_nope.shape, k_nope.stride(), v.stride(), strides, strict=True)
    )


@torch_op("mla_prefill")
def _prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (B, T, H, _), (S, _, D), E, V = q.shape, k_nope.shape[1:], k_pe.shape[2], v.shape[3]
    if B * T * H * S == 0:  # no key: the sum over nothing
        lse = q.new_full((B, H, T) if return_lse else (0,), -math.inf, dtype=torch.float32)
        return q.new_zeros((B, T, H, V)), lse
    tensors = {"q": q, "k_nope": k_nope, "k_pe": k_pe, "v": v} | ({} if gate is None else {"gate": gate})
    if cu_seqlens is not None:
        cu_q = cu_seqlens.to(torch.int32).contiguous()
        cu_k = cu_q if cu_seqlens_k is None else cu_seqlens_k.to(torch.int32).contiguous()
        tensors |= {"cu_seqlens": cu_q, "cu_seqlens_k": cu_k}
    tensors = aligned(tensors)
    strides, values = strides_of(tensors)
    packed = _halves(tensors["k_nope"], tensors["v"])
    if packed:
        strides = {n: x for n, x in strides.items() if n not in ("k_nope", "v")}
    varlen = cu_seqlens is not None
    N = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else 1
    numbers = {"B": B, "T": T, "S": S, "H": H, "D": D, "E": E, "V": V, "N": N}
    known: dict[str, int | Sym] = {**numbers, "T": size_class("T", T, 128), "S": size_class("S", S, 128), "N": 1}
    known["B"] = 1 if B == 1 else Sym("B", min=1)
    if varlen:
        known |= {"N": Sym("N", min=1), "blocks": Sym("blocks", min=1)}
    options = {
        "dtype": q.dtype,
        "causal": causal,
        "scale": scale,
        "lse": return_lse,
        "gate": gate is not None,
        "varlen": varlen,
        "packed": packed,
    }
    executable, knobs = _choose_prefill(numbers, known, options, strides, q.device)
    values |= numbers
    if varlen:
        values["blocks"] = T // knobs["block_q"] + N
    out = executable(tensors, values)
    return out["o"], out["lse"] if return_lse else q.new_empty(0, dtype=torch.float32)


@_prefill.register_fake
def _(q, k_nope, k_pe, v, gate, cu_seqlens, cu_seqlens_k, scale, causal, return_lse):
    B, T, H, _ = q.shape
    lse = q.new_empty((B, H, T) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((B, T, H, v.shape[-1])), lse


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.scale, ctx.causal = inputs[7:9]


def _backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    """Computes the scores again in plain torch and differentiates that."""
    *saved, cu_seqlens, cu_seqlens_k = ctx.saved_tensors

    def again(q: Any, k_nope: Any, k_pe: Any, v: Any, gate: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        o, lse = plain.prefill(q, k_nope, k_pe, v, gate, cu_seqlens, cu_seqlens_k, ctx.scale, ctx.causal)
        return [(o, grad)] if grad_lse is None or not grad_lse.numel() else [(o, grad), (lse, grad_lse)]

    return (*gradients_again(again, saved, ctx.needs_input_grad[:5]), *[None] * 5)


_prefill.register_autograd(_backward, setup_context=_setup_context)


def _joined(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The tensor whose last dim the two are parts of; a new one where they are not neighbours in memory."""
    for name, x in zip(("q[0]", "q[1]"), pair, strict=True):
        check_tensor(name, x)
    a, b = pair
    if a.shape[:-1] != b.shape[:-1] or a.dtype != b.dtype or a.device != b.device:
        fail("q", f"is a pair of {list(a.shape)} and {list(b.shape)}", "pass (q_nope, q_pe) alike but for the last dim")
    known = not torch.compiler.is_compiling() and not isinstance(a, torch._subclasses.FakeTensor)
    if known and a.device.type != "meta" and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        beside = b.data_ptr() == a.data_ptr() + a.shape[-1] * a.element_size()
        if beside and a.stride() == b.stride() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
            return a.as_strided((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.stride(), a.storage_offset())
    return torch.cat([a, b], -1)


def mla_prefill(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    gate: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention over whole sequences, expanded to heads, without positions (DeepSeek-V2,
    arXiv 2405.04434, section 2.1), with the output gate of Kimi K3.

    score = scale (q[..., :D] k_nope + q[..., D:] k_pe); o = softmax(score) v, then o sigmoid(gate). Sums and softmax are
    fp32. Scores may reach 2^26 in magnitude.

    Args:
        q: [B, T, H, D+E], bf16, fp16 or fp32, or a pair (q_nope [B, T, H, D], q_pe [B, T, H, E]), which costs a copy unless
            they are neighbouring views of one tensor. D, E and V (K3: 128, 64, 128) are multiples of 16 up to 256.
        k_nope: [B, S, H, D] and v: [B, S, H, V]. Views of one [B, S, H, D+V], the output of kv_b_proj, cost no copy.
        k_pe: [B, S, E], the key part that all heads share. Any strides, as for the others, with the last dim contiguous.
        scale: of the scores, positive; (D+E)^-0.5 by default. A new value compiles anew.
        causal: query i of a sequence sees its keys up to i + S - T: aligned at the end, as in chunked prefill, where S > T
            has the context first. A query that sees no key has o = 0 and lse = -inf.
        gate: [B, T, H, V]. The attention output is rounded to q's dtype, multiplied by sigmoid(gate) in fp32, and rounded.
        cu_seqlens: [N+1] int32 or int64, offsets of packed sequences (B = 1). It must end at T, or rows past it are left
            undefined. cu_seqlens_k: those of the keys where they differ. Their numbers are read on the device only.
        return_lse: also returns the natural log of the softmax's denominator.

    Returns:
        o [B, T, H, V] in q's dtype, or (o, lse [B, H, T] fp32). Differentiable; the backward pass is plain torch: right, but
        slow, and it stores the scores.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    if isinstance(q, (tuple, list)):
        if len(q) != 2:
            fail("q", f"is a sequence of {len(q)}", "pass one tensor, or (q_nope, q_pe)")
        joined = _joined((q[0], q[1]))
        for n, (part, key) in enumerate((("k_nope", k_nope), ("k_pe", k_pe))):
            check_tensor(part, key)
            if key.dim() and q[n].shape[-1] != key.shape[-1]:
                reason = f"has width {q[n].shape[-1]}, {part} has {key.shape[-1]}"
                fail(f"q[{n}]", reason, "pass (q_nope, q_pe): the head's own part, then that of the shared key")
        q = joined
    return _checked_prefill(q, k_nope, k_pe, v, scale, causal, gate, cu_seqlens, cu_seqlens_k, return_lse)


@replayed
def _checked_prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: bool,
    gate: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    check.check_prefill(q, k_nope, k_pe, v, scale, gate, cu_seqlens, cu_seqlens_k)
    number = None if scale is None else float(scale)
    o, lse = _prefill(q, k_nope, k_pe, v, gate, cu_seqlens, cu_seqlens_k, number, causal, return_lse)
    return (o, lse) if return_lse else o


# ---- decode --------------------------------------------------------------------------------------------------------------

# Defined by schema: what torch.library.custom_op adds to a call counts where a call takes 20 us.
_library = torch.library.Library("k3dsl", "FRAGMENT")
_library.define(
    "mla_decode(Tensor q, Tensor kv_cache, Tensor page_table, Tensor cache_seqlens, float? scale, int kv_lora_rank, "
    "bool causal, bool return_lse) -> (Tensor, Tensor)"
)
_library.define(
    "mla_cache_write_(Tensor latent, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? norm_weight, "
    "float eps) -> ()"
)


def _decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    scale: float | None,
    kv_lora_rank: int,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (B, T, H, width), C = q.shape, kv_lora_rank
    (pages, page, _), max_pages = kv_cache.shape, page_table.shape[1]
    if B * H * pages * max_pages == 0:  # no key: the sum over nothing
        lse = q.new_full((B, H, T) if return_lse else (0,), -math.inf, dtype=torch.float32)
        return q.new_zeros((B, T, H, C)), lse
    check.check_cache_start(kv_cache)
    tensors = {"q": q.flatten(1, 2), "page_table": page_table, "cache_seqlens": cache_seqlens}
    tensors = aligned(tensors) | {"kv_cache": kv_cache}
    strides, values = strides_of(tensors)
    static = {"T": T, "H": H, "C": C, "E": width - C, "page": page}
    numbers = {"B": B, "S": max_pages * page, **static}
    known: dict[str, int | Sym] = {**static, "R": T * H, "B": Sym("B", min=1)}
    known |= {"pages": Sym("pages", min=1), "max_pages": Sym("max_pages", min=1)}
    options = {"dtype": q.dtype, "causal": causal, "scale": scale, "lse": return_lse}
    executable, _ = _choose_decode(numbers, known, options, strides, q.device)
    out = executable(tensors, {**values, "B": B, "pages": pages, "max_pages": max_pages})
    return out["o"].view(B, T, H, C), out["lse"] if return_lse else q.new_empty(0, dtype=torch.float32)


def _cache_write(
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> None:
    (tokens, C), E, (pages, page, _) = latent.shape, k_pe.shape[1], kv_cache.shape
    if tokens * pages == 0:
        return
    check.check_cache_start(kv_cache)
    tensors = {"latent": latent, "k_pe": k_pe, "kv_cache": kv_cache, "slot_mapping": slot_mapping}
    if norm_weight is not None:
        tensors["weight"] = norm_weight.contiguous()
    options = {
        "dtype": latent.dtype,
        "norm": norm_weight is not None,
        "weight_dtype": latent.dtype if norm_weight is None else norm_weight.dtype,
        "eps": eps,
    }
    _write(tensors, {"N": (tokens,), "C": C, "E": E, "page": page, "pages": (pages,)}, options)


for _key in ("CPU", "CUDA"):
    _library.impl("mla_decode", _decode, _key)
    _library.impl("mla_cache_write_", _cache_write, _key)


@torch.library.register_fake("k3dsl::mla_decode")
def _(q, kv_cache, page_table, cache_seqlens, scale, kv_lora_rank, causal, return_lse):
    B, T, H, _ = q.shape
    lse = q.new_empty((B, H, T) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((B, T, H, kv_lora_rank)), lse


@torch.library.register_fake("k3dsl::mla_cache_write_")
def _(latent, k_pe, kv_cache, slot_mapping, norm_weight, eps):
    return None


@replayed
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lora_rank: int = 512,
    causal: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention of the newest tokens of every request, absorbed: heads attend to the cached latents
    themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

    With q^ = W_UK^T q_nope and c the latent: score = scale (q^ c + q_pe k_pe), o = softmax(score) c; W_UV o is the head's
    output. Sums and softmax are fp32.

    Args:
        q: [B, T, H, C+E], bf16, fp16 or fp32: q^ (C = kv_lora_rank, K3: 512), then q_pe (E, K3: 64). T from 1 to 8 new
            tokens, whose rows the cache holds already.
        kv_cache: [pages, page_size, C+E] of q's dtype: normalised latent, then shared key. page_size a multiple of 16;
            pages may lie apart, rows are contiguous.
        page_table: [B, max_pages] int32, the pages of a request in order. Entries past its length, and what their pages
            and the rest of its last page hold, may be anything.
        cache_seqlens: [B] int32, keys of every request; 0 gives o = 0 and lse = -inf.
        scale: of the scores, positive; 192^-0.5 by default: of the width before absorption, not of C+E. A new value
            compiles anew.
        causal: new token t sees keys up to cache_seqlens - T + t; else each sees all.
        return_lse: also returns the natural log of the softmax's denominator.

    Returns:
        o [B, T, H, C] in q's dtype, or (o, lse [B, H, T] fp32). Not differentiable.

    Keys are split over programs as the knob num_splits says, by default so that the GPU is full at what the page table has
    room for. Nothing is read back from the GPU; `k3dsl.ops.mla_cache_write` fills the cache.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check.check_decode(q, kv_cache, page_table, cache_seqlens, scale, kv_lora_rank)
    check_no_grad("mla_decode", q, kv_cache, remedy="use torch.no_grad(), or mla_prefill for training")
    number = None if scale is None else float(scale)
    o, lse = torch.ops.k3dsl.mla_decode(
        q, kv_cache, page_table, cache_seqlens, number, kv_lora_rank, causal, return_lse
    )
    return (o, lse) if return_lse else o


# ---- cache write ---------------------------------------------------------------------------------------------------------


@replayed
def mla_cache_write(
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Writes tokens into a paged MLA cache, in place: kv_cache[slot] = [latent | k_pe].

    Args:
        latent: [T, C] (K3: 512) and k_pe: [T, E] (64), bf16, fp16 or fp32; the halves of kv_a_proj's output [T, C+E] cost no
            copy.
        kv_cache: [pages, page_size, C+E] of the same dtype; pages may lie apart, rows are contiguous.
        slot_mapping: [T] int64, page * page_size + place in the page; a token whose slot is negative is skipped. Two tokens
            of one slot leave either.
        norm_weight: [C], of latent's dtype or fp32: the latent is raw, and its RMSNorm is written (fp32, rounded before the
            weight, as `k3dsl.ops.rmsnorm`). k_pe is never normalised. eps: of the norm; a new value compiles anew.

    Returns:
        kv_cache. Not differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("kv_cache", kv_cache)
    check.check_write(latent, k_pe, kv_cache, slot_mapping, norm_weight, eps)
    check_no_grad("mla_cache_write", latent, k_pe, kv_cache, norm_weight)
    torch.ops.k3dsl.mla_cache_write_(latent, k_pe, kv_cache, slot_mapping, norm_weight, float(eps))
    return kv_cache
