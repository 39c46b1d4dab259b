"""Inputs of the MLA ops by family: mild, like a checkpoint's, of extreme score range, ragged, with garbage past the length.

Every number comes from a seeded CPU generator, so that a case is the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

DEVICE = torch.device | str
GARBAGE_PAGE = 2147480000
"""A page number that an engine may leave in a table past a request's end: reading that page faults."""
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class PrefillCase:
    """One call of mla_prefill.

    scores: 'mild', 'checkpoint' or 'extreme'. S: None is T. lengths, key_lengths: of packed sequences. layout: 'packed'
    (k_nope and v are halves of one tensor), 'apart', or 'strided' (parts of wider tensors, as are q and k_pe).
    """

    name: str
    scores: str = "mild"
    B: int = 1
    T: int = 70
    S: int | None = None
    H: int = 2
    D: int = 128
    E: int = 64
    V: int = 128
    dtype: torch.dtype = BF16
    causal: bool = True
    gate: bool = False
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    layout: str = "packed"


@dataclass(frozen=True)
class DecodeCase:
    """One call of mla_decode. lengths: keys of every request. garbage: table entries and rows past the lengths are wild."""

    name: str
    lengths: tuple[int, ...]
    scores: str = "mild"
    T: int = 1
    H: int = 8
    C: int = 512
    E: int = 64
    page: int = 64
    dtype: torch.dtype = BF16
    causal: bool = True
    garbage: bool = False
    scale: float | None = None


def shaped(
    q: torch.Tensor, k: torch.Tensor, scores: str, generator: torch.Generator, first: Sequence[int] = (0,)
) -> None:
    """Gives normal q [..., K] and k [..., K] the scores of a family, in place.

    checkpoint: keys at `first` (axis -2 of k) attract every query, as attention sinks do, two channels are outliers, and
    every 29th key is close to some query. extreme: scores reach to several hundred.
    """
    width = q.shape[-1]
    if scores == "extreme":
        q *= 40.0
    elif scores == "checkpoint":
        direction = torch.randn(width, generator=generator, device=generator.device)
        direction *= 12.0 / direction.norm()
        q += direction
        for row in first:
            if row < k.shape[-2]:
                k[..., row, :] += direction
        k[..., ::29, :] += 4.0 * direction / 12.0
        for channel in (3, width // 2):
            q[..., channel] *= 4.0
            k[..., channel] *= 3.0


def make_prefill(case: PrefillCase, device: DEVICE, seed: int) -> dict[str, Any]:
    """Keyword arguments of `mla_prefill`."""
    g = torch.Generator().manual_seed(seed)
    T = case.T if case.lengths is None else sum(case.lengths)
    keys = case.key_lengths or case.lengths
    S = (case.T if case.S is None else case.S) if keys is None else sum(keys)
    B, H, D, E, V = case.B, case.H, case.D, case.E, case.V
    q = torch.randn(B, T, H, D + E, generator=g)
    k_nope, k_pe = torch.randn(B, S, H, D, generator=g), torch.randn(B, S, E, generator=g)
    v = torch.randn(B, S, H, V, generator=g)
    starts = [0] if keys is None else torch.tensor([0, *keys[:-1]]).cumsum(0).tolist()
    whole = torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, H, -1)], -1).transpose(1, 2).contiguous()
    shaped(q, whole, case.scores, g, starts)
    k_nope, k_pe = whole.transpose(1, 2)[..., :D], whole[:, 0, :, D:].contiguous()
    if case.layout == "apart":
        k_nope, v = k_nope.contiguous(), v.contiguous()
    k_nope, k_pe, v, q = (x.to(device, case.dtype) for x in (k_nope, k_pe, v, q))
    if case.layout != "apart":
        pair = torch.cat([k_nope, v], -1)
        if case.layout == "strided":
            pair = torch.cat([pair, pair.flip(2)], 2)
            q = torch.cat([q, q], 2)[:, :, :H]
            k_pe = torch.cat([k_pe.flip(1), k_pe], 2)[..., E:]
        k_nope, v = pair[:, :, :H, :D], pair[:, :, :H, D:]
    out: dict[str, Any] = {"q": q, "k_nope": k_nope, "k_pe": k_pe, "v": v}
    out |= {"scale": case.scale, "causal": case.causal, "gate": None, "cu_seqlens": None, "cu_seqlens_k": None}
    if case.gate:
        out["gate"] = (2.0 * torch.randn(B, T, H, V, generator=g)).to(device, case.dtype)
    if case.lengths is not None:
        out["cu_seqlens"] = offsets(case.lengths, device)
    if case.key_lengths is not None:
        out["cu_seqlens_k"] = offsets(case.key_lengths, device)
    return out


def offsets(lengths: Sequence[int], device: DEVICE) -> torch.Tensor:
    """Cumulative lengths [N+1] int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


LARGE_CACHE = 1 << 26
"""Numbers of a cache from which on they are drawn where they are used: on a CPU that many take seconds, and smaller cases are
the same everywhere."""


def make_decode(case: DecodeCase, device: DEVICE, seed: int, room: int | None = None) -> dict[str, Any]:
    """Keyword arguments of `mla_decode`. room: keys that a row of the page table has place for; None: the longest request
    and a page more."""
    B, page, width = len(case.lengths), case.page, case.C + case.E
    room = max(case.lengths, default=0) + page if room is None else room
    columns = -(-room // page)
    used = [-(-n // page) for n in case.lengths]
    total = max(B * columns, 1)
    where = torch.device(device if total * page * width >= LARGE_CACHE else "cpu")
    g = torch.Generator(where).manual_seed(seed)
    q = torch.randn(B, case.T, case.H, width, generator=g, device=where)
    table = torch.randperm(total, generator=g, device=where)[: B * columns].view(B, columns).to(torch.int32)
    cache = torch.randn(total, page, width, generator=g, device=where)
    for b in range(B):
        rows = cache[table[b, : used[b]].long()].reshape(-1, width)
        shaped(q[b], rows, case.scores, g)
        if case.garbage:
            rows[case.lengths[b] :] = torch.nan
        cache[table[b, : used[b]].long()] = rows.view(-1, page, width)
    if case.garbage:
        free = torch.ones(total, dtype=torch.bool, device=where)
        for b in range(B):
            free[table[b, : used[b]].long()] = False
            table[b, used[b] :] = GARBAGE_PAGE
        cache[free] = torch.nan
    return {
        "q": q.to(device, case.dtype),
        "kv_cache": cache.to(device, case.dtype),
        "page_table": table.to(device),
        "cache_seqlens": torch.tensor(case.lengths, dtype=torch.int32).to(device),
        "scale": case.scale,
        "kv_lora_rank": case.C,
        "causal": case.causal,
    }


def make_write(
    tokens: int,
    pages: int,
    page: int,
    C: int,
    E: int,
    dtype: torch.dtype,
    weight: torch.dtype | None,
    device: DEVICE,
    seed: int,
    skipped: int = 3,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Keyword arguments of `mla_cache_write`: halves of one raw tensor, distinct slots, every `skipped`-th one negative.

    weight: dtype of the norm's weight, None for no norm. scale: of the raw latents.
    """
    g = torch.Generator().manual_seed(seed)
    raw = torch.randn(tokens, C + E, generator=g)
    raw[:, :C] *= scale
    raw = raw.to(device, dtype)
    slots = torch.randperm(pages * page, generator=g)[:tokens]
    if skipped:
        slots[::skipped] = -1
    return {
        "latent": raw[:, :C],
        "k_pe": raw[:, C:],
        "kv_cache": torch.randn(pages, page, C + E, generator=g).to(device, dtype),
        "slot_mapping": slots.to(device),
        "norm_weight": None if weight is None else (1 + 0.1 * torch.randn(C, generator=g)).to(device, weight),
        "eps": 1e-6,
    }


# ---- cases ---------------------------------------------------------------------------------------------------------------

RAGGED = (0, 1, 5, 0, 64, 33, 1, 100, 0)


def prefill_cases(size: str) -> list[tuple[str, PrefillCase]]:
    """(family, case) of the correctness suite; 'small' for a CPU, 'whole' has longer sequences too."""
    found: list[tuple[str, PrefillCase]] = []

    def add(family: str, name: str, **fields: Any) -> None:
        found.append((family, PrefillCase(name, **fields)))

    add("mild", "mild")
    add("mild", "mild/gate", gate=True)
    add("checkpoint-like", "checkpoint", scores="checkpoint", T=130)
    add("checkpoint-like", "checkpoint/fp16-gate", scores="checkpoint", dtype=F16, gate=True)
    add("extreme", "extreme", scores="extreme", T=130)
    add("extreme", "extreme/fp16", scores="extreme", dtype=F16)
    add("ragged", "packed", lengths=RAGGED, gate=True)
    add("ragged", "packed/keys", lengths=(8, 0, 3, 40), key_lengths=(3, 9, 0, 100))
    add("ragged", "packed/one", lengths=(1,))
    for T in (1, 63, 64, 65, 127, 129):
        add("shapes, layouts, dtypes", f"T{T}", T=T, H=1)
    add("shapes, layouts, dtypes", "context", T=40, S=170)
    add("shapes, layouts, dtypes", "keys-missing", T=70, S=3)
    add("shapes, layouts, dtypes", "full", T=33, S=100, causal=False)
    add("shapes, layouts, dtypes", "apart", layout="apart", H=3)
    add("shapes, layouts, dtypes", "strided", layout="strided", B=2, T=40)
    add("shapes, layouts, dtypes", "fp32", dtype=F32, T=40, B=2)
    add("shapes, layouts, dtypes", "scale", scale=0.05, D=64, E=32, V=64)
    if size == "whole":
        add("mild", "mild/long", T=2048, H=4, gate=True)
        add("checkpoint-like", "checkpoint/long", scores="checkpoint", T=1500, H=3)
        add("ragged", "packed/many", lengths=(300, 0, 1, 700, 129, 128, 127) * 3, H=4)
        add("shapes, layouts, dtypes", "context/long", T=200, S=3000, H=4)
    return found


def decode_cases(size: str) -> list[tuple[str, DecodeCase]]:
    """(family, case) of the correctness suite; 'small' for a CPU, 'whole' has longer requests and more heads too."""
    found: list[tuple[str, DecodeCase]] = []

    def add(family: str, name: str, lengths: tuple[int, ...], **fields: Any) -> None:
        found.append((family, DecodeCase(name, lengths, **fields)))

    add("mild", "mild", (130, 64))
    add("mild", "mild/long", (700,))
    add("checkpoint-like", "checkpoint", (300, 77), scores="checkpoint")
    add("extreme", "extreme", (300, 77), scores="extreme")
    add("ragged", "ragged", (0, 1, 200, 0, 31, 33))
    add("ragged", "ragged/tokens", (0, 1, 3, 200, 33), T=4, H=3)
    add("garbage past the length", "garbage", (0, 1, 65, 300), garbage=True)
    add("garbage past the length", "garbage/page16", (0, 17, 300), garbage=True, page=16)
    for page in (16, 48, 128):
        add("shapes, layouts, dtypes", f"page{page}", (150, 48), page=page)
    add("shapes, layouts, dtypes", "T8", (150, 8, 5), T=8, H=5)
    add("shapes, layouts, dtypes", "T2-full", (70, 1), T=2, causal=False)
    add("shapes, layouts, dtypes", "H96", (140,), H=96)
    add("shapes, layouts, dtypes", "H12-T3", (140, 40), H=12, T=3)
    add("shapes, layouts, dtypes", "fp16", (140, 40), dtype=F16)
    add("shapes, layouts, dtypes", "fp32", (70, 20), dtype=F32)
    add("shapes, layouts, dtypes", "narrow", (140, 40), C=128, E=32, scale=0.1)
    if size == "whole":
        add("mild", "mild/K3", (4097, 1000, 8192, 1), H=96)
        add("mild", "mild/K3-tensor-parallel", tuple(range(100, 6500, 200)), H=12)
        add("ragged", "ragged/tokens-long", (5000, 0, 7, 64, 1025), T=6, H=24, garbage=True)
    return found
