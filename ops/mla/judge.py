"""How the MLA ops are judged and timed: inputs for given dims and options, cases, references, peers, traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import from_torch, to_torch
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.mla import inputs, reference
from k3dsl.runtime.op import Case
from k3dsl.runtime.plan import Plan
from k3dsl.runtime.timing import plan_traffic

Settings = Mapping[str, Any]
Outputs = dict[str, Any]
ROUNDING = {bf16: 5e-3, f16: 8e-4, f32: 1e-5}
"""Largest relative RMS error of an output: the rounding of the probabilities and of the output."""
LSE = 1e-5


# ---- prefill -------------------------------------------------------------------------------------------------------------


def prefill_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers; with varlen, N sequences of about equal length."""
    T, S = dims["T"], dims["S"] or dims["T"]
    even: dict[str, Any] = {}
    if options["varlen"]:
        for name, total in (("lengths", T), ("key_lengths", S)):
            ends = [total * n // max(1, dims["N"]) for n in range(dims["N"] + 1)]
            even[name] = tuple(b - a for a, b in pairwise(ends))
    case = inputs.PrefillCase(
        "given",
        B=1 if options["varlen"] else dims["B"],
        T=T,
        S=S,
        **{n: dims[n] for n in ("H", "D", "E", "V")},
        dtype=to_torch(options["dtype"]),
        causal=options["causal"],
        gate=options["gate"],
        scale=options["scale"],
        layout="packed" if options["packed"] else "apart",
        **even,
    )
    return inputs.make_prefill(case, device, seed) | {"return_lse": options["lse"]}


def prefill_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error by output."""
    return {"o": ROUNDING[options["dtype"]]} | ({"lse": LSE} if options["lse"] else {})


def prefill_cases(size: str) -> list[Case]:
    """The correctness suite as the judge takes it. Raises ArgumentError for another size than small and whole."""
    common.check_suite(size)

    def maker(case: inputs.PrefillCase) -> Callable[[Any, int], dict[str, Any]]:
        return lambda device, seed: inputs.make_prefill(case, device, seed) | {"return_lse": True}

    return [
        Case(c.name, family, maker(c), {"o": ROUNDING[from_torch(c.dtype)], "lse": LSE})
        for family, c in inputs.prefill_cases(size)
    ]


def prefill_call(**kwargs: Any) -> Outputs:
    """`mla_prefill`, outputs by name."""
    from k3dsl.ops.mla.api import (
        mla_prefill,
    )  # the torch functions take their knobs from space.py, which takes this module

    out = mla_prefill(**kwargs)
    return dict(zip(("o", "lse"), out, strict=True)) if kwargs["return_lse"] else {"o": out}


def prefill_reference(*, return_lse: bool, **kwargs: Any) -> Outputs:
    """The fp64 reference on the same arguments."""
    o, lse = reference.prefill(**kwargs)
    return {"o": o, "lse": lse} if return_lse else {"o": o}


def prefill_peers() -> dict[str, Callable[..., Outputs]]:
    """torch's SDPA through cuDNN and as torch routes it. Both take whole keys, so joining them is part of their time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def routed(**kwargs: Any) -> Outputs:
        return _sdpa(**kwargs)

    def cudnn(**kwargs: Any) -> Outputs:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return _sdpa(**kwargs)

    return {"torch SDPA": routed, "torch SDPA, cuDNN": cudnn}


def _sdpa(
    *,
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: bool,
    gate: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    **_: Any,
) -> Outputs:
    """Keys joined, attention, gate: what the op fuses. Its causal mask starts at the top left, so S = T."""
    if cu_seqlens is not None or (causal and q.shape[1] != k_nope.shape[1]):
        raise NotImplementedError("SDPA takes no packed sequences, and a causal mask for S = T only")
    k = torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, q.shape[2], -1)], -1)
    o = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, scale=scale
    ).transpose(1, 2)
    return {"o": o if gate is None else o * torch.sigmoid(gate)}


# ---- decode --------------------------------------------------------------------------------------------------------------


def decode_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers, every request with S keys in pages in random order."""
    case = inputs.DecodeCase(
        "given",
        (dims["S"],) * dims["B"],
        **{n: dims[n] for n in ("T", "H", "C", "E", "page")},
        dtype=to_torch(options["dtype"]),
        causal=options["causal"],
        scale=options["scale"],
    )
    return inputs.make_decode(case, device, seed, room=dims["S"]) | {"return_lse": options["lse"]}


def decode_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error by output."""
    return prefill_limits(options)


def decode_cases(size: str) -> list[Case]:
    """The correctness suite as the judge takes it. Raises ArgumentError for another size than small and whole."""
    common.check_suite(size)

    def maker(case: inputs.DecodeCase) -> Callable[[Any, int], dict[str, Any]]:
        return lambda device, seed: inputs.make_decode(case, device, seed) | {"return_lse": True}

    return [
        Case(c.name, family, maker(c), {"o": ROUNDING[from_torch(c.dtype)], "lse": LSE})
        for family, c in inputs.decode_cases(size)
    ]


def decode_call(**kwargs: Any) -> Outputs:
    """`mla_decode`, outputs by name."""
    from k3dsl.ops.mla.api import mla_decode

    out = mla_decode(**kwargs)
    return dict(zip(("o", "lse"), out, strict=True)) if kwargs["return_lse"] else {"o": out}


def decode_reference(*, return_lse: bool, **kwargs: Any) -> Outputs:
    """The fp64 reference on the same arguments."""
    o, lse = reference.decode(**kwargs)
    return {"o": o, "lse": lse} if return_lse else {"o": o}


def decode_peers() -> dict[str, Callable[..., Outputs]]:
    """FlashInfer's paged MLA where it can be imported, planned once: planning waits for the GPU and is not timed."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError:
        return {}
    planned: dict[Any, Any] = {}

    def call(
        *,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        scale: float | None,
        kv_lora_rank: int,
        causal: bool,
        **_: Any,
    ) -> Outputs:
        (B, T, H, _w), (_p, page, width), C = q.shape, kv_cache.shape, kv_lora_rank
        key = (cache_seqlens.data_ptr(), page_table.data_ptr(), q.shape, kv_cache.shape)
        if key not in planned:
            planned.clear()
            device = q.device
            counts = (cache_seqlens + page - 1) // page
            used = torch.arange(page_table.shape[1], device=device)[None, :] < counts[:, None]
            wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device=device))
            wrapper.plan(
                torch.arange(B + 1, dtype=torch.int32, device=device) * T,
                torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
                page_table[used].contiguous(),
                cache_seqlens,
                H,
                C,
                width - C,
                page,
                causal,
                192**-0.5 if scale is None else scale,
                q.dtype,
                kv_cache.dtype,
            )
            planned[key] = wrapper
        flat = q.flatten(0, 1)
        o = planned[key].run(flat[..., :C], flat[..., C:], kv_cache[..., :C], kv_cache[..., C:])
        return {"o": o.view(B, T, H, C)}

    return {"flashinfer BatchMLAPagedAttentionWrapper": call}


# ---- cache write ---------------------------------------------------------------------------------------------------------


def write_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers, every token with a slot of its own as far as there are slots; the others have none."""
    io = to_torch(options["dtype"])
    weight = io if options["weight_dtype"] is None else to_torch(options["weight_dtype"])
    tokens, room = dims["N"], dims["pages"] * dims["page"]
    made = inputs.make_write(
        min(tokens, room),
        dims["pages"],
        dims["page"],
        dims["C"],
        dims["E"],
        io,
        weight if options["norm"] else None,
        device,
        seed,
        skipped=0,
    )
    missing = tokens - min(tokens, room)
    if missing:
        made["latent"], made["k_pe"] = (
            torch.cat([made[n], made[n].new_zeros(missing, made[n].shape[1])]) for n in ("latent", "k_pe")
        )
        made["slot_mapping"] = torch.cat([made["slot_mapping"], made["slot_mapping"].new_full((missing,), -1)])
    return made | {"eps": options["eps"]}


def write_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error: two roundings, or none."""
    return {"kv_cache": {bf16: 4e-3, f16: 5e-4, f32: 1e-6}[options["dtype"]] if options["norm"] else 0.0}


def write_cases(size: str) -> list[Case]:
    """Norm or none, dtypes, pages, padding, large and tiny numbers; 'whole' has many tokens too."""
    common.check_suite(size)
    found = []
    half, full = torch.bfloat16, torch.float32

    def add(
        family: str,
        name: str,
        limit: float,
        dtype: torch.dtype = half,
        weight: torch.dtype | None = half,
        tokens: int = 20,
        pages: int = 3,
        page: int = 16,
        **more: Any,
    ) -> None:
        def make(device: Any, seed: int) -> dict[str, Any]:
            return inputs.make_write(tokens, pages, page, 512, 64, dtype, weight, device, seed, **more)

        found.append(Case(name, family, make, {"kv_cache": limit}))

    for dtype, name, limit in ((half, "bf16", 4e-3), (torch.float16, "fp16", 5e-4), (full, "fp32", 1e-6)):
        add("mild", f"norm/{name}", limit, dtype, dtype)
        add("mild", f"plain/{name}", 0.0, dtype, None)
    add("mild", "norm/fp32-weight", 4e-3, weight=full, page=48)
    add("extreme", "norm/large", 4e-3, scale=1e15)
    add("extreme", "norm/small", 4e-3, scale=1e-4)
    add("ragged", "norm/none-skipped", 4e-3, tokens=33, skipped=0)
    add("ragged", "norm/all-skipped", 4e-3, tokens=5, skipped=1)
    if size == "whole":
        add("mild", "norm/many", 4e-3, tokens=9000, pages=200, page=64)
    return found


def write_call(**kwargs: Any) -> Outputs:
    """`mla_cache_write`, the cache by name. Changes the cache that it is given."""
    from k3dsl.ops.mla.api import mla_cache_write

    return {"kv_cache": mla_cache_write(**kwargs)}


def write_reference(**kwargs: Any) -> Outputs:
    """The fp64 reference on the same arguments."""
    return {"kv_cache": reference.cache_write(**kwargs)}


def prefill_flops(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of scores and output, of the keys that each query sees; of packed sequences as if all were as long, which is least."""
    d = common.known_dims(plan, dims)
    pieces = d["N"] if plan.options["varlen"] else 1
    seen = pieces * common.seen_pairs(d["T"] // pieces, d["S"] // pieces, plan.options["causal"])
    return {"mla_prefill": 2 * d["B"] * d["H"] * seen * (d["D"] + d["E"] + d["V"])}


def decode_flops(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of scores and output, of every latent in the cache's pages with each of a request's R rows: lengths are data."""
    d = common.known_dims(plan, dims)
    return {"mla_decode": 2 * d["R"] * d["pages"] * d["page"] * (2 * d["C"] + d["E"])}


def write_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of the cache one row a token is written."""
    moved = plan_traffic(plan, dims)
    (launch,) = plan.launches
    cache = launch.kernel.tensor("kv_cache")
    whole, row = cache.dtype.bytes, cache.dtype.bytes
    for extent in cache.shape:
        whole *= extent.evaluate(dims)
    row *= cache.shape[-1].evaluate(dims)
    return {launch.label: moved[launch.label] - 2 * whole + row * dims["N"]}
