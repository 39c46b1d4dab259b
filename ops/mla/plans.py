"""Which kernels, buffers and schedules make up an MLA call, for given dims, knobs and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DType, f32, i32, i64
from k3dsl.language import TensorSpec
from k3dsl.ops.common import Schedules, Settings, Strides, launch_of, one_launch, spec_of, traced
from k3dsl.ops.mla import kernels, tables
from k3dsl.runtime.plan import Plan, buffers_of


def packed_strides(dims: Settings) -> tuple[int | Expr, ...]:
    """Strides of k_nope and v where they are the halves of one tensor [B, S, H, D+V]."""
    row = dims["D"] + dims["V"]
    return (Expr.of(dims["S"]) * (dims["H"] * row), dims["H"] * row, row, 1)


def prefill(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """One launch, and two small ones before it for packed sequences. dims: B, T, S, H, D, E, V; with options['varlen'] also N
    sequences and `blocks`, the rows of the block table."""
    io = options["dtype"]
    sequences = {n: dims[n] for n in ("N", "blocks") if n in dims}
    dims = {n: x for n, x in dims.items() if n != "N"}  # the kernel sees packed sequences through the block table
    variant = {
        **options,
        **knobs,
        "precision": "ieee" if io == f32 else None,
        "scale": (dims["D"] + dims["E"]) ** -0.5 if options["scale"] is None else options["scale"],
    }
    layout: dict[str, Any] = dict(strides or {})
    if options["packed"]:
        layout |= dict.fromkeys(("k_nope", "v"), packed_strides(dims))
    spec = spec_of(layout)
    tensors: dict[str, DType | TensorSpec | None] = {n: spec(n, io) for n in ("q", "k_nope", "k_pe", "v", "o")}
    tensors["gate"] = spec("gate", io) if options["gate"] else None
    tensors["lse"] = f32 if options["lse"] else None
    tensors["block_table"] = i32 if options["varlen"] else None
    ir = traced(kernels.mla_prefill, dims, variant, tensors)
    default = {"num_warps": knobs["num_warps"], "stages": {"keys": knobs["stages"], "edge": 1}}
    # a warp group for every 64 queries, so that a row's softmax stays in one of them
    own = {"threads": min(512, max(128, 2 * knobs["block_q"])), "stages": default["stages"]}
    launches = [launch_of("mla_prefill", ir, backend, schedules, default, own)]
    if options["varlen"]:
        dims |= sequences
        numbers = {"cu_seqlens": i32, "cu_seqlens_k": i32, "found": i32}
        find = traced(tables.blocks, sequences, variant, numbers)
        order = traced(tables.ordered, sequences, variant, {"found": i32, "block_table": i32})
        small = {"num_warps": 4}
        launches.insert(0, launch_of("blocks", find, backend, schedules, small))
        launches.insert(1, launch_of("ordered", order, backend, schedules, small))
    buffers = buffers_of([launch.kernel for launch in launches], scratch=("found", "block_table"))
    return Plan("mla.prefill", dims, buffers, tuple(launches), knobs, options)


def decode(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """One launch for one split, else two. dims: B, T, H, R = T H, C, E, page, pages, max_pages."""
    io, splits = options["dtype"], knobs["num_splits"]
    d = {n: x for n, x in dims.items() if n != "S"} | {"splits": splits}  # the kernels see S as max_pages pages
    c = {
        **options,
        **knobs,
        "precision": "ieee" if io == f32 else None,
        "scale": 192**-0.5 if options["scale"] is None else options["scale"],
    }
    spec = spec_of(strides)
    final = {"o": io, "lse": f32 if options["lse"] else None}
    partial: dict[str, DType | None] = {"o_partial": f32, "lse_partial": f32}
    none = dict.fromkeys
    reads = {"q": spec("q", io), "kv_cache": spec("kv_cache", io), "page_table": spec("page_table", i32)}
    writes = {**final, **none(partial)} if splits == 1 else {**none(final), **partial}
    first = traced(kernels.mla_decode, d, c, {**reads, **writes})
    one = launch_of("mla_decode", first, backend, schedules, decode_schedule(knobs), decode_tilelang(knobs))
    if io == f32:  # over whose products of 64 rows ptxas takes minutes
        one = replace(one, least_shared=(knobs["block_h"] + knobs["block_n"]) * (d["C"] + d["E"]) * io.bytes)
    launches = [one]
    if splits > 1:
        rows = {n: d[n] for n in ("B", "T", "H", "R", "C", "splits")}
        second = traced(kernels.mla_combine, rows, c, {**final})
        launches.append(launch_of("mla_combine", second, backend, schedules, {"num_warps": 4, "stages": {"splits": 2}}))
    buffers = buffers_of([x.kernel for x in launches], scratch=tuple(partial))
    for name in final:
        if name in buffers:
            buffers[name] = replace(buffers[name], role="out")
    return Plan("mla.decode", d, buffers, tuple(launches), knobs, options)


def decode_schedule(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The edge is one or two blocks, read through shared memory too: in registers they would not fit beside the output."""
    return {"num_warps": knobs["num_warps"], "stages": {"keys": knobs["stages"], "edge": min(2, knobs["stages"])}}


def decode_tilelang(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Two warp groups, each with half of the output's columns, from 64 rows on; for fewer one, which copies for itself."""
    wide = knobs["block_h"] >= 64
    stages = {"keys": knobs["stages"], "edge": 1}
    return {"threads": 256 if wide else 128, "stages": stages, "warp_specialize": wide}


def cache_write(
    dims: Settings,
    knobs: Settings,
    options: Settings,
    backend: str,
    schedules: Schedules = None,
    strides: Strides = None,
) -> Plan:
    """One launch. dims: N tokens, C, E, page, pages."""
    io = options["dtype"]
    weight = (options["weight_dtype"] or io) if options["norm"] else None
    dtypes: dict[str, DType | None] = {
        "latent": io, "k_pe": io, "weight": weight, "slot_mapping": i64, "kv_cache": io
    }  # fmt: skip
    default = {"num_warps": knobs["num_warps"]}
    return one_launch(
        "mla.cache_write", kernels.mla_cache_write, dims, knobs, options, dtypes, backend, schedules, strides, default
    )


def table_dims(given: Mapping[str, Any]) -> dict[str, Any]:
    """R, and the extents of page table and cache where every request has room for S keys."""
    d = {**given, "R": given["T"] * given["H"]}
    if isinstance(given["S"], int) and isinstance(given["B"], int):
        d["max_pages"] = -(-given["S"] // given["page"])
        d["pages"] = given["B"] * d["max_pages"]
    else:
        d["max_pages"], d["pages"] = Sym("max_pages", min=1), Sym("pages", min=1)
    return d
