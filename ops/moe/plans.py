"""Plans of the MoE ops: which launches a call makes for its dims, options and knobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.symbols import Expr, cdiv, smaller
from k3dsl.ir.types import f32, i32, u8
from k3dsl.ops.common import Schedules, Settings, Strides, launch_of, one_launch, spec_of, traced
from k3dsl.ops.moe import grouped, routing
from k3dsl.runtime.plan import Launch, Plan, buffers_of

SORTED = ("order", "slots", "expert_offsets", "block_expert", "block_row")
"""What sorting makes for the products."""
GATHER_ROWS, GATHER_COLUMNS = 4, 1024
"""What a program of the gather moves."""
_SORTING = ("counts", "base", "block_offsets")


def situ(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """One launch. dims: R rows, I columns."""
    io = options["dtype"]
    names = ("gate", "up", "grad", "grad_gate", "grad_up") if options["backward"] else ("gate", "up", "y")
    kernel = grouped.situ_backward if options["backward"] else grouped.situ
    default = {"num_warps": knobs["num_warps"]}
    return one_launch(
        "moe.situ", kernel, dims, knobs, options, dict.fromkeys(names, io), backend, schedules, strides, default
    )


def topk(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """One launch on given logits. dims: T tokens, E experts, K chosen."""
    c = {**knobs, **options, "splits": 1}
    kernel = traced(routing.topk, dims, c, {"bias": f32 if options["bias"] else None})
    launch = launch_of("topk", kernel, backend, schedules, {"num_warps": knobs["rows"]})
    return Plan("moe.topk", dims, buffers_of([kernel]), (launch,), knobs, options)


def router(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """Logits in pieces of D, then their sum and the selection. dims: T, D, E, K."""
    spec, c = spec_of(strides), {**knobs, **options}
    tensors = {"x": spec("x", options["dtype"]), "weight": spec("weight", options["weight_dtype"])}
    products = traced(routing.logits, dims, c, tensors)
    selection = traced(routing.topk, dims, c, {"bias": f32 if options["bias"] else None})
    launches = (
        launch_of(
            "logits",
            products,
            backend,
            schedules,
            {"num_warps": knobs["num_warps"], "stages": {"k": knobs["stages"]}},
        ),
        launch_of("topk", selection, backend, schedules, {"num_warps": knobs["rows"]}),
    )
    buffers = buffers_of([products, selection], scratch=("partial",))
    return Plan("moe.router", dims, buffers, launches, knobs, options)


def sorting_dims(dims: Settings, knobs: Settings) -> dict[str, Any]:
    """The dims with those of sorting: W lanes for the bins, chunks of pairs, and a bound of the number of row blocks.

    An expert of n rows has at most (n + block_m - 1) / block_m blocks, and one block holds at least one pair.
    """
    pairs = Expr.of(dims["T"]) * dims["K"]
    bound = smaller(pairs, cdiv(pairs, knobs["block_m"]) + (dims["E"] - 1))
    made = {"chunks": cdiv(pairs, knobs["chunk"]), "bound": bound}
    lanes = 1 << dims["E"].bit_length()  # the least power of two above E
    return {**dims, "W": lanes, **{n: e if e.constant is None else e.constant for n, e in made.items()}}


def sorting(
    d: Settings, c: Settings, backend: str, schedules: Schedules, strides: Strides
) -> tuple[list[IRKernel], list[Launch]]:
    """The kernels and launches that put pairs in the order of their experts."""
    ids = {"ids": spec_of(strides)("ids", c["ids_dtype"])}
    count = traced(routing.count, d, c, ids)
    offsets = traced(routing.offsets, d, c, {})
    place = traced(routing.place, d, c, ids)
    wide = {"num_warps": 4 if d["W"] <= 512 else 8}
    launches = [
        launch_of("count", count, backend, schedules, {"num_warps": 4}),
        launch_of("offsets", offsets, backend, schedules, wide),
        launch_of("place", place, backend, schedules, {"num_warps": 4}),
    ]
    return [count, offsets, place], launches


def sort(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """Count, offsets, place. dims: T, K, E. options give block_m, which is part of the result."""
    c = {**knobs, **options}
    d = sorting_dims(dims, c)
    kernels, launches = sorting(d, c, backend, schedules, strides)
    buffers = buffers_of(kernels, scratch=_SORTING)
    buffers |= {n: replace(buffers[n], role="out") for n in SORTED}
    return Plan("moe.sort", d, buffers, tuple(launches), knobs, options)


def whole_runs(dims: Settings) -> bool:
    """Whether the columns of both products can be put in lane order."""
    return dims["D"] % grouped.LANE_COLUMNS == 0 == dims["I"] % grouped.LANE_COLUMNS


def experts(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """Sorting, with gather='before' the tokens' rows by expert, gate and up with the activation, down, combine. dims: T, K, E,
    D, I."""
    spec, io, packed = spec_of(strides), options["dtype"], options["weights"] == "mxfp4"
    fits = whole_runs(dims) and min(knobs["block_n"], knobs["block_k"]) >= grouped.LANE_COLUMNS
    ordered = packed and knobs["lane_order"] and knobs["gather"] == "before" and fits
    c = {**knobs, **options, "precision": options["precision"] if io == f32 else None, "lane_order": ordered}
    d = sorting_dims(dims, c)
    for name in ("D", "I"):
        d[f"{name}P"] = d[name] // 2 if packed else d[name]
    stored = u8 if packed else io
    weights = {n: spec(n, stored) for n in ("w_gate", "w_up", "w_down")}
    scales = {n: spec(n, u8) if packed else None for n in ("gate_scale", "up_scale", "down_scale")}

    def pick(*names: str) -> dict[str, Any]:
        return {n: x for n, x in (weights | scales).items() if n in names}

    kernels, launches = sorting(d, c, backend, schedules, strides)
    before = knobs["gather"] == "before"
    rows = {"x": None, "xs": io, "order": None} if before else {"x": spec("x", io), "xs": None, "order": i32}
    first = traced(grouped.gate_up, d, c, {**rows, **pick("w_gate", "w_up", "gate_scale", "up_scale"), "h": io})
    wide = {"block_n": knobs["block_n"] * (2 if knobs["wide_down"] else 1)}
    second = traced(grouped.down, d, c | wide, {"h": io, **pick("w_down", "down_scale"), "y": io})
    last = traced(grouped.combine, d, c, {"y": io, "weights": f32, "out": io})
    default = {"num_warps": knobs["num_warps"], "stages": {"k": knobs["stages"]}}
    threads = 384 if knobs["block_m"] == 192 else max(128, 32 * knobs["num_warps"])  # three warp groups of 64 rows
    own = {"threads": threads, "stages": {"k": knobs["stages"]}}
    if before:
        c |= {"gather_rows": GATHER_ROWS, "gather_columns": min(GATHER_COLUMNS, 1 << (d["D"] - 1).bit_length())}
        moved = traced(grouped.gather, d, c, {"x": spec("x", io), "xs": io})
        kernels.append(moved)
        launches.append(launch_of("gather", moved, backend, schedules, {"num_warps": 4}))
    launches += [
        launch_of("gate_up", first, backend, schedules, default, own),
        launch_of("down", second, backend, schedules, default, own),
        launch_of("combine", last, backend, schedules, {"num_warps": 4}),
    ]
    kernels += [first, second, last]
    buffers = buffers_of(kernels, scratch=(*_SORTING, *SORTED, *(["xs"] if before else []), "h", "y"))
    return Plan("moe.experts", d, buffers, tuple(launches), knobs, options)
