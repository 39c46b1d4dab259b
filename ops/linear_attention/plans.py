"""Which kernels, buffers and schedules make up a call of linear attention, the delta rule or the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3dsl.ir.symbols import cdiv
from k3dsl.ir.types import bf16, f16, f32, i32
from k3dsl.ops import common
from k3dsl.ops.kda import kernels as kda_kernels
from k3dsl.ops.kda import plans as kda_plans
from k3dsl.ops.kda.space import FORWARD as KDA
from k3dsl.ops.linear_attention import kernels
from k3dsl.runtime.plan import Plan, buffers_of

SCRATCH = (*kda_plans.FACTORS, *kda_plans.FLAGS, *kda_plans.TABLES)


def state_dims(dims: common.Settings, options: common.Settings) -> dict[str, Any]:
    """The dims with those of a state, SA by SB."""
    shape = (dims["V"], dims["K"]) if options["v_first"] else (dims["K"], dims["V"])
    return {**dims, "SA": shape[0], "SB": shape[1]}


def _types(options: common.Settings, strides: common.Strides) -> dict[str, Any]:
    """Dtypes and layouts of the caller's tensors."""
    spec = common.spec_of(strides)
    types: dict[str, Any] = {name: spec(name, options["dtype"]) for name in ("q", "k", "v")}
    types["o"] = options["dtype"]
    for name in ("g", "beta"):
        if f"{name}_dtype" in options:
            types[name] = spec(name, options[f"{name}_dtype"])
    if options.get("initial_state") is not None:
        types["initial_state"] = spec("initial_state", options["initial_state"])
    if options.get("final_state") is not None:
        types["final_state"] = options["final_state"]
    if options.get("varlen"):
        types |= {"cu_seqlens": options["cu_dtype"]} | dict.fromkeys(kda_plans.TABLES, i32)
    return types


def delta(
    name: str,
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """prep, then KDA's scan. dims: B, T, H (value heads), HK, K, V, N sequences; with options['varlen'] also chunks."""
    d = state_dims(dims, options)
    c = {**kda_plans.variant(d, *_as_kda(knobs, options)), "gram": "scalar"}
    if not options["varlen"]:
        d["chunks"] = kda_plans.plain(cdiv(dims["T"], c["C"]))
    d["XC"] = 2 * c["C"] if c["split"] else c["C"]
    io = options["dtype"]
    c["gram_precision"] = knobs["precision"] if io == f32 else None
    types = _types(options, strides) | dict.fromkeys(kda_plans.FACTORS[:-1], c["factors"])
    types |= {"x": bf16} if c["split"] else {}
    types |= dict.fromkeys(kda_plans.FLAGS, i32)
    prep = kda_plans.kernel_of(kernels.prep, d, c, types)
    warps = {"num_warps": 4 if c["C"] <= 32 and io != f32 else 8}
    launches = [
        *(kda_plans.table_launches(d, c, types, backend, schedules or {}) if options["varlen"] else ()),
        common.launch_of("prep", prep, backend, schedules, warps, {"threads": 128}),
        *kda_plans.guarded(
            "scan", kda_kernels.scan, "rescan", kda_kernels.rescan, d, c, types, backend, schedules or {}
        ),
    ]
    return _plan(name, d, launches, knobs, options)


def _as_kda(knobs: common.Settings, options: common.Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Knobs and options as KDA's kernels know them: a given log decay, a given beta."""
    shared = {n: x for n, x in knobs.items() if n in {k.name for k in KDA.knobs}}
    known = {o.name for o in KDA.options}
    given = {n: x for n, x in options.items() if n in known}
    fixed = {"gate": "none", "beta_sigmoid": False, "lower_bound": None}
    return KDA.resolve_knobs(shared), KDA.resolve_options({**given, **fixed})


def linear(
    name: str,
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: B, T, H (value heads), HK, K, V, N sequences."""
    d = state_dims(dims, options)
    io = options["dtype"]
    c = {
        "C": knobs["chunk"],
        "BV": knobs["block_v"],
        "precision": knobs["precision"] if io == f32 else None,
        # fp16 holds neither a long sum nor unnormalised scores
        "operand": bf16 if io == bf16 else f32,
        "wide_precision": {bf16: None, f16: "tf32", f32: knobs["precision"]}[io],
        "state_parts": knobs["state_parts"],
        "normalize": options["normalize"],
        "scale": options["scale"] if options["scale"] is not None else dims["K"] ** -0.5,
        "varlen": options["varlen"],
        "tail": kda_plans.tail(dims["T"], knobs["chunk"]),
        "v_first": options["v_first"],
    }
    types = {n: t for n, t in _types(options, strides).items() if n in kernels.linear.parameters}
    whole = common.traced(kernels.linear, d, c, types)
    schedule = {"num_warps": 4 if c["BV"] <= 64 and c["C"] <= 32 else 8, "stages": {"chunks": knobs["stages"]}}
    tilelang = {"threads": max(128, 2 * c["BV"]), "stages": {"chunks": knobs["stages"]}}
    launch = common.launch_of("linear", whole, backend, schedules, schedule, tilelang)
    return _plan(name, d, [launch], knobs, options)


def token(
    name: str,
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: B requests, H, HK, K, V, slots."""
    d = state_dims(dims, options)
    c = {
        "BV": knobs["block_v"],
        "l2norm": options.get("l2norm", False),
        "scale": options["scale"] if options["scale"] is not None else dims["K"] ** -0.5,
        "v_first": options["v_first"],
    }
    types = _types(options, strides)
    types["state"] = common.spec_of(strides)("state", options["state"])
    if options["indexed"]:
        types["state_indices"] = i32
    if not options["in_place"]:
        types["new_state"] = options["state"]
    kernel = common.traced(kernels.token, d, c, types)
    launch = common.launch_of("token", kernel, backend, schedules, kda_plans.decode_schedule(c))
    return Plan(name, d, buffers_of([kernel]), (launch,), knobs, options)


def _plan(name: str, d: Mapping[str, Any], launches: list[Any], knobs: Any, options: Any) -> Plan:
    buffers = buffers_of([x.kernel for x in launches], scratch=SCRATCH)
    for out in ("o", "final_state"):
        if out in buffers:
            buffers[out] = replace(buffers[out], role="out")
    return Plan(name, d, buffers, tuple(launches), knobs, options)
