"""The attention.decode op for the registry: dims, options, knobs with their constraints, and a rule for untuned shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.backends.triton.text import pow2
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.attention import decode, reference
from k3dsl.ops.attention.space import HEADS, MAX_WIDTH
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan, buffers_of

ROWS = (16, 32, 64, 128)
"""Choices of queries times heads of a group that a program holds."""

SCRATCH = ("partial_o", "partial_lse")


def derived_dims(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """HK and V follow from H and D where they are 0."""
    return {**given, "HK": given["HK"] or given["H"], "V": given["V"] or given["D"]}


def plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """attend, and combine where the keys are split. dims: B, T queries, S slots of the cache, H, HK, D, V."""
    io, spec = options["dtype"], common.spec_of(strides)
    group = pow2(dims["H"] // dims["HK"])
    c = {
        "tokens": max(1, knobs["rows"] // group),
        "group": group,
        "block_k": knobs["block_k"],
        "splits": knobs["splits"],
        "precision": options["precision"] if io == f32 else None,
        "scale": dims["D"] ** -0.5 if options["scale"] is None else options["scale"],
    }
    lse = f32 if options["lse"] else None
    split = knobs["splits"] > 1
    types: dict[str, Any] = {"q": spec("q", io), "k_cache": spec("k_cache", io), "v_cache": spec("v_cache", io)}
    out = dict.fromkeys(SCRATCH, f32) if split else {"o": io, "lse": lse}
    kernels = [common.traced(decode.attend, dims, c, {**types, **out})]
    stages = {"keys": knobs["stages"], "edge": 1}
    # a row's softmax stays in one warp group
    tilelang = {"threads": max(128, 2 * c["tokens"] * group), "stages": stages}
    triton = {"num_warps": knobs["num_warps"], "stages": stages}
    launches = [common.launch_of("attend", kernels[0], backend, schedules, triton, tilelang)]
    if split:
        kernels.append(common.traced(decode.combine, dims, c, {"o": io, "lse": lse}))
        launches.append(common.launch_of("combine", kernels[1], backend, schedules, {"num_warps": 4}))
    return Plan("attention.decode", dims, buffers_of(kernels, scratch=SCRATCH), tuple(launches), knobs, options)


def constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = common.head_constraints(dims, *HEADS) + common.width_constraints(dims, D=MAX_WIDTH, V=MAX_WIDTH)
    if reasons:
        return reasons
    group = pow2(dims["H"] // dims["HK"])
    if knobs["rows"] < min(group, ROWS[-1]):  # a larger group has a program a query, whatever rows is
        return [f"rows {knobs['rows']} hold no query of a group of {group} heads"]
    return []


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Rows for the queries there are; parts of the keys until some 256 programs have work, 256 keys a part at least."""
    group = pow2(dims["H"] // dims["HK"])
    rows = min(ROWS[-1], max(16, min(64, group * pow2(max(1, dims["T"]))), group))
    programs = max(1, dims["B"] * dims["HK"] * -(-dims["T"] * group // rows))
    splits = 1
    while splits < 64 and programs * splits < 256 and splits * 256 < dims["S"]:
        splits *= 2
    wide = options["dtype"] == f32
    return {"rows": rows, "splits": splits, "block_k": 32 if wide else 64, "stages": 1 if wide else 2, "num_warps": 4}


def inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers; lengths spread from the whole cache down to the queries alone, and NaN in the slots past them."""
    d = derived_dims(dims, options)
    generator = torch.Generator().manual_seed(seed)
    io = to_torch(options["dtype"])
    B, S = d["B"], d["S"]
    lengths = (S - torch.arange(B) * max(0, S - d["T"]) // max(1, B - 1)).to(torch.int32)
    free = torch.arange(S)[None, :] >= lengths[:, None]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def cache(width: int) -> torch.Tensor:
        return draw(B, S, d["HK"], width).masked_fill(free[..., None, None], float("nan")).to(device, io)

    return {
        "q": draw(B, d["T"], d["H"], d["D"]).to(device, io),
        "k_cache": cache(d["D"]),
        "v_cache": cache(d["V"]),
        "cache_seqlens": lengths.to(device),
        "scale": options["scale"],
        "precision": options["precision"],
    }


def call(**arguments: Any) -> dict[str, Any]:
    """The op's torch function with its outputs by name."""
    from k3dsl.ops.attention.api import attention_decode

    o, lse = attention_decode(**arguments, return_lse=True)
    return {"o": o, "lse": lse}


def _reference(*, precision: str = "ieee", **x: Any) -> dict[str, Any]:
    return dict(zip(("o", "lse"), reference.attention_decode(**x), strict=True))


def _sdpa(**x: Any) -> dict[str, Any]:
    """torch's scaled_dot_product_attention with a mask made from the lengths."""
    q, k, v = (x[name].transpose(1, 2) for name in ("q", "k_cache", "v_cache"))
    T, S = q.shape[2], k.shape[2]
    last = x["cache_seqlens"][:, None] - T + torch.arange(T, device=q.device)
    seen = (torch.arange(S, device=q.device) <= last[..., None])[:, None]
    v = torch.where(torch.arange(S, device=q.device)[:, None] < x["cache_seqlens"][:, None, None, None], v, 0.0)
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k.nan_to_num(), v, attn_mask=seen, scale=x["scale"], enable_gqa=q.shape[1] != k.shape[1]
    )
    return {"o": o.nan_to_num().transpose(1, 2)}


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: the rounding of the probabilities and of the output."""
    if options["dtype"] == f32:
        loose = options["precision"] == "tf32"
        return {"o": 2e-3 if loose else 1e-5, "lse": 1e-3 if loose else 1e-5}
    return {"o": {bf16: 5e-3, f16: 8e-4}[options["dtype"]], "lse": 1e-5}


ATTENTION_DECODE = Op(
    name="attention.decode",
    doc="Causal softmax attention of the last tokens against a cache of keys and values, a length a request.",
    dims=(
        Dim("B", 32, "requests", divisor=1),
        Dim("T", 1, "queries of a request, its last tokens", divisor=1),
        Dim("S", 8192, "slots of the cache"),
        Dim("H", 32, "query heads", static=True),
        Dim("HK", 8, "key and value heads; 0: as many as query heads", static=True, empty=True),
        Dim("D", 128, "width of queries and keys", static=True),
        Dim("V", 0, "width of values; 0: as the keys", static=True),
    ),
    knobs=(
        Knob("rows", ROWS, 16, "queries times heads of a group a program"),
        Knob("block_k", (16, 32, 64, 128), 64, "keys in one step"),
        Knob("splits", (1, 2, 4, 8, 16, 32, 64), 1, "parts of the keys, put together by a second launch"),
        Knob("num_warps", (1, 2, 4, 8), 4, "warps a program"),
        Knob("stages", (1, 2, 3, 4), 2, "steps in flight"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of q, the caches and o"),
        Option("scale", (), None, "of the scores; None: 1/sqrt(D)", constant=True, positive=True),
        Option("lse", (True, False), True, "writes the log-sum-exp"),
        Option("precision", ("ieee", "tf32x3", "tf32"), "ieee", "how fp32 products are formed"),
    ),
    plan=plan,
    launches=("attend", "combine"),
    inputs=inputs,
    call=call,
    reference=_reference,
    peers=lambda: {"torch": _sdpa},
    limits=limits,
    constraints=constraints,
    heuristic=rule,
    prepare_dims=derived_dims,
    cpu_dims={"B": 3, "S": 256, "H": 4, "HK": 2, "D": 64},
    seeds=(
        {"rows": 16, "block_k": 128, "stages": 3},
        {"rows": 64, "block_k": 64, "stages": 3},
    ),
)
