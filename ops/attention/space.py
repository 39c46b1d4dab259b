"""The attention op for the registry: dims, options, knobs with their constraints, and a rule for shapes nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.attention import kernels, reference
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan

HEADS = ("query heads", "key and value heads")
MAX_WIDTH = 256
"""Of a head's queries and keys, and of its values."""


def derived_dims(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """HK, V and S follow from H, D and T where they are 0."""
    d = dict(given)
    for name, source in (("HK", "H"), ("V", "D"), ("S", "T")):
        if isinstance(given[name], int):
            d[name] = given[name] or given[source]
    return d


def plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: B, T queries, S keys, H query heads, HK key heads, D and V widths."""
    io = options["dtype"]
    variant = {
        **options,
        "precision": options["precision"] if io == f32 else None,
        "scale": dims["D"] ** -0.5 if options["scale"] is None else options["scale"],
    }
    dtypes = {"q": io, "k": io, "v": io, "o": io, "lse": f32 if options["lse"] else None}
    default = {"num_warps": knobs["num_warps"], "stages": {"keys": knobs["stages"], "edge": knobs["stages"]}}
    own = tilelang_schedule(knobs)
    return common.one_launch(
        "attention", kernels.attention, dims, knobs, variant, dtypes, backend, schedules, strides, default, own
    )


def tilelang_schedule(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """A warp group for every 64 queries, so that a row's softmax stays in one of them. Only the long loop is pipelined."""
    threads = min(512, max(128, 2 * knobs["block_q"]))
    return {"threads": threads, "stages": {"keys": knobs["stages"], "edge": 1}}


def constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = common.head_constraints(dims, *HEADS) + common.width_constraints(dims, D=MAX_WIDTH, V=MAX_WIDTH)
    T, S = dims["T"], dims["S"]
    if options["causal"] and isinstance(T, int) and isinstance(S, int) and S < T:
        reasons.append(f"S = {S} keys for T = {T} queries: a causal mask needs as many")
    return reasons


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Blocks that fit shared memory; small ones for few queries and for fp32."""
    if options["dtype"] == f32:
        return {"block_q": 32, "block_k": 32, "num_warps": 8, "stages": 1}
    if dims["T"] <= 64:
        return {"block_q": 16 if dims["T"] <= 16 else 64, "block_k": 64, "num_warps": 4, "stages": 2}
    wide = max(dims["D"], dims["V"]) > 128
    return {"block_q": 64 if wide else 128, "block_k": 64, "num_warps": 4 if wide else 8}


def inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers."""
    d = derived_dims(dims, options)
    generator = torch.Generator().manual_seed(seed)
    io = to_torch(options["dtype"])

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, io)

    return {
        "q": draw(d["B"], d["T"], d["H"], d["D"]),
        "k": draw(d["B"], d["S"], d["HK"], d["D"]),
        "v": draw(d["B"], d["S"], d["HK"], d["V"]),
        "causal": options["causal"],
        "scale": options["scale"],
        "precision": options["precision"],
    }


def call(**arguments: Any) -> dict[str, Any]:
    """The op's torch function with its outputs by name."""
    from k3dsl.ops.attention.api import attention

    o, lse = attention(**arguments, return_lse=True)
    return {"o": o, "lse": lse}


def _reference(**x: Any) -> dict[str, Any]:
    x.pop("precision", None)
    return dict(zip(("o", "lse"), reference.attention(**x), strict=True))


def _sdpa(**x: Any) -> dict[str, Any]:
    """torch's scaled_dot_product_attention. Its causal mask starts at the top left, so it is a peer where S = T."""
    q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
    shared = q.shape[1] != k.shape[1]
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=x["causal"], scale=x["scale"], enable_gqa=shared
    )
    return {"o": o.transpose(1, 2)}


def flops(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of scores and output, of the keys that each query sees."""
    d = common.known_dims(plan, dims)
    seen = common.seen_pairs(d["T"], d["S"], plan.options["causal"])
    return {"attention": 2 * d["B"] * d["H"] * seen * (d["D"] + d["V"])}


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: the rounding of the probabilities and of the output."""
    if options["dtype"] == f32:
        loose = options["precision"] == "tf32"
        return {"o": 2e-3 if loose else 1e-5, "lse": 1e-3 if loose else 1e-5}
    return {"o": {bf16: 5e-3, f16: 8e-4}[options["dtype"]], "lse": 1e-5}


ATTENTION = Op(
    name="attention",
    doc="Softmax attention, forward: causal or not, grouped key heads, log-sum-exp on request.",
    dims=(
        Dim("B", 1, "batch"),
        Dim("T", 8192, "queries"),
        Dim("S", 0, "keys; 0: as many as queries"),
        Dim("H", 32, "query heads", static=True),
        Dim("HK", 0, "key and value heads; 0: as many as query heads", static=True),
        Dim("D", 128, "width of queries and keys", static=True),
        Dim("V", 0, "width of values; 0: as the keys", static=True),
    ),
    knobs=(
        Knob("block_q", (16, 32, 64, 128, 256), 128, "queries a program"),
        Knob("block_k", (16, 32, 64, 128), 64, "keys in one step"),
        Knob("num_warps", (1, 2, 4, 8, 16), 8, "warps a program"),
        Knob("stages", (1, 2, 3, 4), 2, "steps in flight"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of q, k, v and o"),
        Option("causal", (True, False), True, "hides the keys after a query"),
        Option("scale", (), None, "of the scores; None: 1/sqrt(D)", constant=True, positive=True),
        Option("lse", (True, False), True, "writes the log-sum-exp"),
        Option("precision", ("ieee", "tf32x3", "tf32"), "ieee", "how fp32 products are formed"),
    ),
    plan=plan,
    launches=("attention",),
    inputs=inputs,
    call=call,
    reference=_reference,
    peers=lambda: {"torch": _sdpa},
    limits=limits,
    flops=flops,
    constraints=constraints,
    heuristic=rule,
    prepare_dims=derived_dims,
    cpu_dims={"B": 1, "T": 256, "H": 4, "D": 64},
    seeds=(
        {"block_q": 128, "block_k": 64, "num_warps": 8, "stages": 3},
        {"block_q": 128, "block_k": 128, "num_warps": 8, "stages": 2},
        {"block_q": 64, "block_k": 64, "num_warps": 4, "stages": 3},
    ),
)
