"""Checks of what a user hands to the MLA ops: shapes, dtypes, devices, strides, and numbers that no kernel makes sense of."""

from __future__ import annotations

import math

import torch

from k3dsl.ops.common import (
    check_contiguous_rows,
    check_numbers,
    check_offset_values,
    check_offsets,
    check_rank,
    check_same,
    check_tensor,
    check_width,
    dtype_name,
    fail,
    has_data,
    is_width,
)

MAX_WIDTH = 256
MAX_LATENT = 512
MAX_TOKENS = 8
ALIGNMENT = 16


def check_scale(scale: float | None) -> None:
    """Raises ArgumentError unless the scale is None or positive and finite."""
    if scale is not None and (not isinstance(scale, (int, float)) or not 0 < scale < math.inf):
        fail("scale", f"is {scale}", "pass a positive finite number, or None for the width of a key, D + E, to -0.5")


def _widths(name: str, *widths: tuple[str, int]) -> None:
    for dim, width in widths:
        check_width(name, dim, width, MAX_WIDTH)


def check_prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    gate: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> None:
    """Raises ArgumentError for arguments that mla_prefill does not take."""
    for name, x, dims in (
        ("q", q, "[B, T, H, D+E]"),
        ("k_nope", k_nope, "[B, S, H, D]"),
        ("k_pe", k_pe, "[B, S, E]"),
        ("v", v, "[B, S, H, V]"),
    ):
        check_tensor(name, x)
        check_rank(name, x, 3 if name == "k_pe" else 4, dims, f"{name} as {dims}")
        check_contiguous_rows(name, x)
        check_same(name, x, "q", q)
    B, T, H, K = q.shape
    S, D, E, V = k_nope.shape[1], k_nope.shape[3], k_pe.shape[2], v.shape[3]
    if k_nope.shape[0] != B or k_nope.shape[2] != H:
        fail("k_nope", f"has shape {list(k_nope.shape)}, needs [B, S, H, D] with B = {B}, H = {H} of q", "a key a head")
    if tuple(k_pe.shape[:2]) != (B, S):
        fail("k_pe", f"has shape {list(k_pe.shape)}, needs [{B}, {S}, E] as k_nope", "one row a token, for all heads")
    if K != D + E:
        fail("q", f"has width {K}, k_nope and k_pe have {D} + {E}", "q is the head's own part, then the shared one")
    if v.shape[:3] != k_nope.shape[:3]:
        fail("v", f"has shape {list(v.shape)}, needs [B, S, H, V] with {list(k_nope.shape[:3])}", "one value a key")
    _widths("k_nope", ("D", D))
    _widths("k_pe", ("E", E))
    _widths("v", ("V", V))
    check_scale(scale)
    if gate is not None:
        check_tensor("gate", gate)
        check_same("gate", gate, "q", q)
        check_contiguous_rows("gate", gate)
        if tuple(gate.shape) != (B, T, H, V):
            fail("gate", f"has shape {list(gate.shape)}, needs {[B, T, H, V]}", "gate.view(B, T, H, V)")
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            fail("cu_seqlens_k", "is given without cu_seqlens", "pass the offsets of the queries as cu_seqlens")
        return
    if B != 1:
        fail("cu_seqlens", f"is given, and q has B = {B}", "pack the sequences along T, so that B = 1")
    N = check_offsets("cu_seqlens", cu_seqlens)
    check_same("cu_seqlens", cu_seqlens, "q", q, dtype=False)
    if cu_seqlens_k is not None:
        check_same("cu_seqlens_k", cu_seqlens_k, "q", q, dtype=False)
        if check_offsets("cu_seqlens_k", cu_seqlens_k) != N:
            fail("cu_seqlens_k", f"is for {cu_seqlens_k.shape[0] - 1} sequences, cu_seqlens for {N}", "one for each")
    elif S != T:
        fail("k_nope", f"has S = {S} keys for T = {T} queries", "pass the offsets of the keys as cu_seqlens_k")
    if has_data(cu_seqlens):
        check_offset_values("cu_seqlens", cu_seqlens.tolist(), "q", T)
    if cu_seqlens_k is not None and has_data(cu_seqlens_k):
        check_offset_values("cu_seqlens_k", cu_seqlens_k.tolist(), "k_nope", S, "S")


def _check_cache(kv_cache: torch.Tensor, width: int, owner: str) -> None:
    if kv_cache.shape[1] % 16 or kv_cache.shape[1] == 0:
        fail("kv_cache", f"has pages of {kv_cache.shape[1]} tokens", "a page has a multiple of 16 tokens")
    if kv_cache.shape[2] != width:
        fail(
            "kv_cache",
            f"has rows of {kv_cache.shape[2]}, {owner} of {width}",
            "a row is the latent, then the shared key",
        )


def check_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    scale: float | None,
    kv_lora_rank: int,
) -> None:
    """Raises ArgumentError for arguments that mla_decode does not take."""
    check_tensor("q", q)
    check_rank("q", q, 4, "[B, T, H, C+E]", "q as [B, T, H, C+E]: the absorbed part, then the shared one")
    check_contiguous_rows("q", q)
    check_tensor("kv_cache", kv_cache)
    check_rank("kv_cache", kv_cache, 3, "[pages, page_size, C+E]", "kv_cache as [pages, page_size, C+E]")
    check_same("kv_cache", kv_cache, "q", q)
    check_contiguous_rows("kv_cache", kv_cache)
    B, T, _, width = q.shape
    if not 1 <= T <= MAX_TOKENS:
        remedy = "use mla_prefill for more" if T else "leave out a call without tokens"
        fail("q", f"has T = {T} new tokens, needs 1 to {MAX_TOKENS}", remedy)
    C, E = kv_lora_rank, width - kv_lora_rank
    if not isinstance(C, int) or not is_width(C, MAX_LATENT):
        fail("kv_lora_rank", f"is {C}, needs a multiple of 16 up to {MAX_LATENT}", "it is the width of the latent")
    if not is_width(E, MAX_WIDTH):
        fail(
            "q",
            f"has width {width}, of which {E} is left beside kv_lora_rank = {C}",
            f"{C} absorbed, then the shared key's width",
        )
    _check_cache(kv_cache, width, "q")
    for name, x, shape in (("page_table", page_table, "[B, max_pages]"), ("cache_seqlens", cache_seqlens, "[B]")):
        check_tensor(name, x, (torch.int32,))
        check_rank(name, x, 2 if name == "page_table" else 1, shape, f"{name} as {shape}")
        check_same(name, x, "q", q, dtype=False)
        check_contiguous_rows(name, x)
        if x.shape[0] != B:
            fail(name, f"is for {x.shape[0]} requests, q for {B}", "one row a request")
    check_scale(scale)
    check_numbers(_check_pages, cache_seqlens, page_table, *kv_cache.shape[:2])


def _check_pages(cache_seqlens: torch.Tensor, page_table: torch.Tensor, pages: int, page: int) -> None:
    """The numbers of a decode call on the CPU: lengths that the table has room for, pages that the cache has."""
    columns = page_table.shape[1]
    for b, length in enumerate(cache_seqlens.tolist()):
        if not 0 <= length <= columns * page:
            reason = f"is {length} for request {b}, the page table has room for 0 to {columns * page}"
            fail("cache_seqlens", reason, "give page_table more columns, or count the tokens that are in the cache")
        used = page_table[b, : -(-length // page)].tolist()
        if used and not 0 <= min(used) <= max(used) < pages:
            wrong = next(p for p in used if not 0 <= p < pages)
            reason = f"names page {wrong} for request {b}, and the cache has {pages}"
            fail("page_table", reason, "number pages from 0; entries past a request's length may be any number")


def check_write(
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Raises ArgumentError for arguments that mla_cache_write does not take."""
    for name, x, dims in (("latent", latent, "[T, C]"), ("k_pe", k_pe, "[T, E]")):
        check_tensor(name, x)
        check_rank(name, x, 2, dims, f"{name} as {dims}")
        check_contiguous_rows(name, x)
        check_same(name, x, "kv_cache", kv_cache)
    check_rank("kv_cache", kv_cache, 3, "[pages, page_size, C+E]", "kv_cache as [pages, page_size, C+E]")
    check_contiguous_rows("kv_cache", kv_cache)
    T, C = latent.shape
    if k_pe.shape[0] != T:
        fail("k_pe", f"has {k_pe.shape[0]} rows, latent has {T}", "one row a token")
    for name, width, most in (("latent", C, MAX_LATENT), ("k_pe", k_pe.shape[1], MAX_WIDTH)):
        if not is_width(width, most):
            fail(name, f"has width {width}, needs a multiple of 16 up to {most}", "K3 has 512 and 64")
    _check_cache(kv_cache, C + k_pe.shape[1], "latent and k_pe")
    check_tensor("slot_mapping", slot_mapping, (torch.int64,))
    check_same("slot_mapping", slot_mapping, "kv_cache", kv_cache, dtype=False)
    if tuple(slot_mapping.shape) != (T,):
        fail(
            "slot_mapping", f"has shape {list(slot_mapping.shape)}, needs [{T}]", "one slot a token; negative for none"
        )
    check_contiguous_rows("slot_mapping", slot_mapping)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight)
        check_same("norm_weight", norm_weight, "latent", latent, dtype=False)
        if norm_weight.dtype not in (latent.dtype, torch.float32):
            reason = f"is {dtype_name(norm_weight.dtype)}, latent is {dtype_name(latent.dtype)}"
            fail("norm_weight", reason, "norm_weight.to(latent.dtype), or fp32")
        if tuple(norm_weight.shape) != (C,):
            fail(
                "norm_weight", f"has shape {list(norm_weight.shape)}, needs [{C}]", "one number a channel of the latent"
            )
    if not 0 <= eps < math.inf:
        fail("eps", f"is {eps}", "pass a finite number of at least 0")
    check_numbers(_check_mapping, slot_mapping, kv_cache.shape[0] * kv_cache.shape[1])


def _check_mapping(slot_mapping: torch.Tensor, room: int) -> None:
    slots = [n for n in slot_mapping.tolist() if n >= 0]
    if slots and max(slots) >= room:
        fail("slot_mapping", f"names slot {max(slots)}, the cache has {room}", "slots go from 0 to pages * page_size")
    if len(set(slots)) != len(slots):
        fail("slot_mapping", "names a slot twice", "one token a slot")


def check_cache_start(kv_cache: torch.Tensor) -> None:
    """Raises ArgumentError for a cache that code which counts on whole vectors cannot address."""
    if kv_cache.data_ptr() % ALIGNMENT:
        fail("kv_cache", "does not start at a multiple of 16 bytes", "allocate the cache on its own")
