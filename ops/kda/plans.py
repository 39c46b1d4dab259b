"""Which kernels, buffers and schedules make up a KDA call, for given dims, knobs and options."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3dsl.ir.symbols import Expr, Sym, cdiv
from k3dsl.ir.types import DType, bf16, f16, f32, i32
from k3dsl.language import TensorSpec
from k3dsl.ops.common import Settings, launch_of, spec_of, traced
from k3dsl.ops.kda import kernels
from k3dsl.runtime.plan import Plan, buffers_of

FACTORS = ("w", "kg", "qg", "x", "aqk", "decay")
Dims = Mapping[str, Any]


def variant(dims: Dims, knobs: Settings, options: Settings) -> dict[str, Any]:
    """The trace-time values shared by the kernels of a call."""
    io: DType = options["dtype"]
    full = io == f32
    factors: DType = f32 if full else knobs["factors"]
    gram = "levels" if full or not anchored(options, knobs["chunk"]) else "anchor"
    return {
        "C": knobs["chunk"],
        "BV": knobs["block_v"],
        "gate": options["gate"],
        "lower_bound": options["lower_bound"],
        "gram": gram,
        "gram_dtype": f32 if full else bf16,
        "gram_precision": knobs["precision"] if full else "bf16",
        "scan_precision": knobs["precision"] if full else {bf16: "bf16", f16: "fp16"}[factors],
        "inverse": knobs["inverse"],
        "inverse_precision": "ieee" if full else knobs["inverse_precision"],
        "approx": knobs["approx"] and not full,
        "vec": knobs["vector"],
        "l2norm": options["l2norm"],
        "beta_sigmoid": options["beta_sigmoid"],
        "neg_eigval": options["neg_eigval"],
        "scale": options["scale"] if options["scale"] is not None else dims["K"] ** -0.5,
        "varlen": options["varlen"],
        "tail": tail(dims["T"], knobs["chunk"]) if "T" in dims else False,
        "v_first": options["v_first"],
        "guard": factors == f16,
        "split": factors == f16 and io == bf16,
        "wide": False,
    }


def anchored(options: Settings, chunk: int) -> bool:
    """True when one Gram product around a constant anchor cannot overflow: a bounded gate and unit keys."""
    if not options["l2norm"] or options["lower_bound"] is None or options["gate"] == "softplus":
        return False
    if options["gate"] == "none" and not options["safe_gate"]:
        return False
    return kernels.anchor_of(chunk, options["lower_bound"]) <= kernels.ANCHOR_LIMIT


def tail(tokens: int | Sym | Expr, chunk: int) -> bool:
    """True when a sequence may end inside a chunk."""
    return Expr.of(tokens).divisor() % chunk != 0 if not isinstance(tokens, int) else tokens % chunk != 0


def forward(
    dims: Dims,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Mapping[str, Mapping[str, Any]] | None = None,
    strides: Mapping[str, tuple[int | Sym, ...]] | None = None,
) -> Plan:
    """prep, then scan. dims: B, T, H (value heads), HK (query and key heads), K, V, N sequences.

    With options['varlen'] also `chunks`, an upper bound of the number of chunks. strides: of the caller's tensors that
    are not contiguous.
    """
    schedules, spec = schedules or {}, spec_of(strides)
    c = variant(dims, knobs, options)
    state_shape = (dims["V"], dims["K"]) if options["v_first"] else (dims["K"], dims["V"])
    d = {**dims, "SA": state_shape[0], "SB": state_shape[1]}
    if not options["varlen"]:
        d["chunks"] = cdiv(dims["T"], c["C"])
        d["chunks"] = d["chunks"].constant if d["chunks"].constant is not None else d["chunks"]
    d["XC"] = 2 * c["C"] if c["split"] else c["C"]
    io, factors = options["dtype"], f32 if options["dtype"] == f32 else knobs["factors"]

    stored = dict.fromkeys(FACTORS[:-1], factors) | ({"x": bf16} if c["split"] else {})
    offsets = {"cu_seqlens": options["cu_dtype"]} if options["varlen"] else {}
    prep = traced(
        kernels.prep,
        d,
        c,
        {
            **{name: spec(name, io) for name in ("q", "k")},
            "g": spec("g", options["gate_dtype"]),
            "beta": spec("beta", options["beta_dtype"]),
            **gate_tensors(options),
            **offsets,
            **({"chunk_table": i32} if options["varlen"] else {}),
            **stored,
        },
    )
    states: dict[str, DType | TensorSpec | None] = {}
    if options["initial_state"] is not None:
        states["initial_state"] = spec("initial_state", options["initial_state"])
    if options["final_state"] is not None:
        states["final_state"] = options["final_state"]
    reads = {
        "v": spec("v", io),
        **stored,
        **states,
        **offsets,
        **({"chunk_offsets": i32} if options["varlen"] else {}),
        "o": io,
    }
    scan = traced(kernels.scan, d, c, {**reads, **({"out_of_range": i32} if c["guard"] else {})})
    launches = [
        launch_of("prep", prep, backend, schedules, prep_schedule(c), {"threads": 128}),
        launch_of("scan", scan, backend, schedules, scan_schedule(c), scan_schedule_tilelang(c)),
    ]
    if c["guard"]:
        wide = {**c, "wide": True, "guard": False, "scan_precision": "tf32"}
        rescan = traced(kernels.rescan, d, wide, reads)
        once = {"num_warps": 4 if c["BV"] <= 64 else 8, "stages": {"chunks": 1}}
        single = {**scan_schedule_tilelang(c), "stages": {"chunks": 1}}
        launches.append(launch_of("rescan", rescan, backend, schedules, once, single))
    buffers = buffers_of([x.kernel for x in launches], scratch=(*FACTORS, "out_of_range"))
    for name in ("o", "final_state"):
        if name in buffers:
            buffers[name] = replace(buffers[name], role="out")
    return Plan("kda.forward", d, buffers, tuple(launches), knobs, options)


def prep_schedule(c: Settings) -> dict[str, Any]:
    """Warps, and a register cap where it pays."""
    if c["gram"] == "levels":
        return {"num_warps": 4 if c["C"] <= 32 else 8}
    fields: dict[str, Any] = {"num_warps": 2 if c["C"] == 16 else 4}
    if c["C"] == 32 and triton_release() < (3, 7):
        # four programs a multiprocessor instead of three; newer Triton's code spills under this cap
        fields["maxnreg"] = 128
    return fields


def triton_release() -> tuple[int, int]:
    """Triton's version; (0, 0) where it is not installed."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)
    return int(major), int(minor)


def scan_schedule(c: Settings) -> dict[str, Any]:
    """Three stages where they fit, two for fp32 or long chunks."""
    stages = 3 if c["scan_precision"] in ("bf16", "fp16") and c["C"] <= 32 else 2
    return {"num_warps": 4 if c["BV"] <= 64 else 8, "stages": {"chunks": stages}}


def scan_schedule_tilelang(c: Settings) -> dict[str, Any]:
    """A warp group for every 64 rows of the state, so that a row's products stay in one of them."""
    stages = 3 if c["scan_precision"] in ("bf16", "fp16") and c["C"] <= 32 else 2
    return {"threads": max(128, 2 * c["BV"]), "stages": {"chunks": stages}}


def gate_tensors(options: Settings) -> dict[str, DType]:
    """The gate's parameters that the call has."""
    if options["gate"] == "none":
        return {}
    return {name: f32 for name in ("A_log", "dt_bias") if options[name]}


def decode_schedule(c: Settings) -> dict[str, Any]:
    """A warp for every 8 rows of a [V, K] state, for every 16 columns of a [K, V] one."""
    return {"num_warps": max(1, c["BV"] // (8 if c["v_first"] else 16))}


def decode(
    dims: Dims,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Mapping[str, Mapping[str, Any]] | None = None,
    strides: Mapping[str, tuple[int | Sym, ...]] | None = None,
) -> Plan:
    """One launch. dims: B requests, H, HK, K, V, slots."""
    schedules, spec = schedules or {}, spec_of(strides)
    state_shape = (dims["V"], dims["K"]) if options["v_first"] else (dims["K"], dims["V"])
    d = {**dims, "SA": state_shape[0], "SB": state_shape[1]}
    c = {
        "BV": knobs["block_v"],
        "gate": options["gate"],
        "lower_bound": options["lower_bound"],
        "approx": False,
        "l2norm": options["l2norm"],
        "beta_sigmoid": options["beta_sigmoid"],
        "neg_eigval": options["neg_eigval"],
        "scale": options["scale"] if options["scale"] is not None else dims["K"] ** -0.5,
        "v_first": options["v_first"],
    }
    io = options["dtype"]

    tensors: dict[str, DType | TensorSpec | None] = {
        **{name: spec(name, io) for name in ("q", "k", "v")},
        "g": spec("g", options["gate_dtype"]),
        "beta": spec("beta", options["beta_dtype"]),
        **gate_tensors(options),
        "state": spec("state", options["state"]),
        "o": io,
    }
    if options["indexed"]:
        tensors["state_indices"] = i32
    if not options["in_place"]:
        tensors["new_state"] = options["state"]
    kernel = traced(kernels.decode, d, c, tensors)
    launch = launch_of("decode", kernel, backend, schedules, decode_schedule(c))
    return Plan("kda.decode", d, buffers_of([kernel]), (launch,), knobs, options)
