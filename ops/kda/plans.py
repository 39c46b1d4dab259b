"""Which kernels, buffers and schedules make up a KDA call, for given dims, knobs and options."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.symbols import Expr, Sym, cdiv, larger, smaller
from k3dsl.ir.types import DType, bf16, f16, f32, i32
from k3dsl.language import TensorSpec
from k3dsl.ops.common import Settings, generator_of, launch_of, spec_of, traced
from k3dsl.ops.kda import decode as decode_kernels
from k3dsl.ops.kda import fused, kernels, segments, tables
from k3dsl.runtime.plan import Launch, Plan, Step, buffers_of

FACTORS = ("w", "kg", "qg", "x", "aqk", "decay")
BOUNDARIES = ("segment_ends", "transition", "incoming")
"""What the segmented scan keeps of each segment."""
CARRIED = ("carried", "seen")
"""Between slices: the states, and the largest numbers so far."""
SCAN_LANE = -1
MOST_CHUNKS = 1 << 27
"""Of 2^31 rows, 16 to a chunk."""
SLICE = {"first": MOST_CHUNKS, "slice_chunks": MOST_CHUNKS, "part": 255, "parts": 256}
"""Dims of one slice and what each is at most: its first chunk, its number of chunks, its own number and that of all slices."""
FLAGS = ("out_of_range", "end_out_of_range")
TABLES = ("chunk_table", "chunk_offsets", "segment_table", "segment_offsets")
"""Where packed sequences' chunks and segments lie."""
Dims = Mapping[str, Any]
Schedules = Mapping[str, Mapping[str, Any]]


def variant(dims: Dims, knobs: Settings, options: Settings) -> dict[str, Any]:
    """The trace-time values shared by the kernels of a call."""
    io: DType = options["dtype"]
    full = io == f32
    factors: DType = f32 if full else knobs["factors"]
    gram = "levels" if full or not anchored(options, knobs["chunk"]) else "anchor"
    # what the levels multiply is then at most 1, while factors around an anchor need the range of bf16
    unit = gram == "levels" and factors == f16 and options["l2norm"]
    products = knobs["precision"] if full else {bf16: "bf16", f16: "fp16"}[factors]
    return {
        "C": knobs["chunk"],
        "BV": knobs["block_v"],
        "gate": options["gate"],
        "lower_bound": options["lower_bound"],
        "gram": gram,
        "gram_dtype": f32 if full else f16 if unit else bf16,
        "gram_precision": knobs["precision"] if full else None,
        "factor_precision": products,
        "scan_precision": products,
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
        "own_tails": False,
        "v_first": options["v_first"],
        "factors": factors,
        "guard": factors == f16,
        "split": factors == f16 and io == bf16,
        "wide": False,
        "segments": knobs["segments"],
        "sliced": knobs["slices"] > 1,
        "BM": min(knobs["block_v"], dims["K"]),
        "maps": knobs["maps"],
        "map_precision": knobs["map_precision"],
        "scaled": factors == f16,
        "fold_precision": "ieee" if full else "tf32x3",
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
    """prep, then the scan, whole or in segments; or both in one kernel. dims: B, T, H (value heads), HK (query and key
    heads), K, V, N sequences.

    With options['varlen'] also `chunks`, an upper bound of the number of chunks. strides: of the caller's tensors that
    are not contiguous.
    """
    spec = spec_of(strides)
    c = variant(dims, knobs, options)
    state_shape = (dims["V"], dims["K"]) if options["v_first"] else (dims["K"], dims["V"])
    d = {**dims, "SA": state_shape[0], "SB": state_shape[1]}
    if not options["varlen"]:
        d["chunks"] = plain(cdiv(dims["T"], c["C"]))
    d["XC"] = 2 * c["C"] if c["split"] else c["C"]
    if knobs["segments"] > 1:
        d["segment_chunks"] = plain(segment_chunks(d["chunks"], knobs["segments"]))
        sequences = Expr.of(dims["N"])
        # packed sequences share the segments, and the last one of each may be short
        d["segments"] = plain(sequences + knobs["segments"] if options["varlen"] else sequences * knobs["segments"])
    if knobs["slices"] > 1:
        d |= {name: Sym(name, max=most) for name, most in SLICE.items()}
    else:
        d |= {"first": 0, "slice_chunks": d["chunks"]}
    io = options["dtype"]
    stored = dict.fromkeys(FACTORS[:-1], c["factors"]) | ({"x": bf16} if c["split"] else {})
    offsets = {"cu_seqlens": options["cu_dtype"]} if options["varlen"] else {}
    types = {
        **{name: spec(name, io) for name in ("q", "k", "v")},
        "g": spec("g", options["gate_dtype"]),
        "beta": spec("beta", options["beta_dtype"]),
        **gate_tensors(options),
        **offsets,
        **stored,
        **(dict.fromkeys(TABLES, i32) if offsets else {}),
        **dict.fromkeys(BOUNDARIES, f32),
        **dict.fromkeys(FLAGS, i32),
        **(dict.fromkeys(CARRIED, f32) if knobs["slices"] > 1 else {}),
        "o": io,
    }
    if options["initial_state"] is not None:
        types["initial_state"] = spec("initial_state", options["initial_state"])
    if options["final_state"] is not None:
        types["final_state"] = options["final_state"]
    launches = []
    if options["varlen"] and knobs["form"] != "one":
        launches = table_launches(d, c, types, backend, schedules or {})
    first = len(launches)
    launches += (one_kernel if knobs["form"] == "one" else two_passes)(d, c, types, backend, schedules or {})
    buffers = buffers_of([x.kernel for x in launches], scratch=(*FACTORS, *BOUNDARIES, *FLAGS, *TABLES, *CARRIED))
    for name in ("o", "final_state"):
        if name in buffers:
            buffers[name] = replace(buffers[name], role="out")
    steps = in_slices(d, knobs["slices"], first, len(launches)) if knobs["slices"] > 1 else ()
    return Plan("kda.forward", d, buffers, tuple(launches), knobs, options, steps)


def table_launches(d: Dims, c: Settings, types: Mapping[str, Any], backend: str, schedules: Schedules) -> list[Launch]:
    """What tells the others where packed sequences' chunks lie, and their segments."""
    d = without_slice(d)
    found = [launch_of("tables", kernel_of(tables.chunk_tables, d, c, types), backend, schedules, {"num_warps": 4})]
    if c["segments"] > 1:
        kernel = kernel_of(tables.segment_tables, d, c, types)
        found.append(launch_of("segment_tables", kernel, backend, schedules, {"num_warps": 4}))
    return found


def without_slice(d: Dims) -> dict[str, Any]:
    """The dims of a call, without those of one slice of it."""
    return {n: x for n, x in d.items() if n not in SLICE}


def in_slices(d: Dims, slices: int, tables: int, launches: int) -> tuple[Step, ...]:
    """prep of every slice, and the scan of each once its prep and the scan before it have ended. The first `tables` launches
    come before all, those past the scan after all.

    The scan's chain is what a call waits for in the end, so its lane goes first; preps take turns on two lanes, so that one
    begins while the last programs of the one before it run."""
    chunks = Expr.of(d["chunks"])
    length = cdiv(chunks, slices)
    steps = [Step(n) for n in range(tables)]
    ready = tuple(range(tables))
    for part in range(slices):
        first = smaller(length * part, chunks)
        own = {"first": first, "slice_chunks": smaller(length, chunks - first)}
        own |= {"part": Expr.of(part), "parts": Expr.of(slices)}
        prep = len(steps)
        steps.append(Step(tables, own, lane=part % 2, after=ready))
        steps.append(Step(tables + 1, own, lane=SCAN_LANE, after=(prep,)))
    return (*steps, *[Step(n, lane=SCAN_LANE) for n in range(tables + 2, launches)])


def plain(extent: int | Sym | Expr) -> int | Expr:
    """An extent as a number where it is one."""
    e = Expr.of(extent)
    return e if e.constant is None else e.constant


def segment_chunks(chunks: int | Sym | Expr, wanted: int) -> Expr:
    """Chunks of a segment, at least 1, so that `wanted` segments or fewer hold `chunks`."""
    return larger(cdiv(Expr.of(chunks), wanted), 1)


def kernel_of(kernel: Any, d: Dims, c: Settings, types: Mapping[str, Any]) -> IRKernel:
    """The kernel's IR; of `types` it takes those that it has a parameter for, but no flags where nothing guards."""
    taken = {n: t for n, t in types.items() if n in kernel.parameters}
    if not c["guard"]:
        taken = {n: t for n, t in taken.items() if n not in (*FLAGS, "seen") or not kernel.parameters[n].optional}
    return traced(kernel, d, c, taken)


def two_passes(d: Dims, c: Settings, types: Mapping[str, Any], backend: str, schedules: Schedules) -> list[Launch]:
    """prep, and the scan over whole sequences or over segments."""
    # TileLang gives the tiles of two branches no common memory, and the CPU runs masked programs all at once
    in_triton = generator_of("prep", backend, schedules) == "triton"
    only_tails = isinstance(d["T"], int) and d["T"] < c["C"]
    own_tails = not only_tails and (c["own_tails"] or (in_triton and c["gram_dtype"] != f32))
    prep = kernel_of(kernels.prep, d, {**c, "own_tails": own_tails}, types)
    first = launch_of("prep", prep, backend, schedules, prep_schedule(c), {"threads": 128})
    if c["segments"] > 1:
        return [first, *segmented(d, c, types, backend, schedules)]
    return [first, *guarded("scan", kernels.scan, "rescan", kernels.rescan, d, c, types, backend, schedules)]


def guarded(
    label: str,
    kernel: Any,
    again: str,
    kernel_again: Any,
    d: Dims,
    c: Settings,
    types: Mapping[str, Any],
    backend: str,
    schedules: Schedules,
) -> list[Launch]:
    """A scan and, where fp16 factors ask for one, the launch that does flagged blocks again with tf32 products."""
    scan = kernel_of(kernel, d, c, types)
    launches = [launch_of(label, scan, backend, schedules, scan_schedule(c), scan_schedule_tilelang(c))]
    if c["guard"]:
        # over whole sequences, however they were cut
        wide = {**widened(c), "sliced": False}
        rescan = kernel_of(kernel_again, without_slice(d), wide, types)
        once = {"num_warps": 4 if c["BV"] <= 64 else 8, "stages": {"chunks": 1}}
        single = {**scan_schedule_tilelang(c), "stages": {"chunks": 1}}
        launches.append(launch_of(again, rescan, backend, schedules, once, single))
    return launches


def widened(c: Settings) -> dict[str, Any]:
    """The variant whose scan takes its operands in fp32 and multiplies in tf32, which has the range of fp32."""
    return {**c, "wide": True, "guard": False, "scaled": False, "scan_precision": "tf32"}


def segmented(d: Dims, c: Settings, types: Mapping[str, Any], backend: str, schedules: Schedules) -> list[Launch]:
    """The maps of all segments, the fold over them, and the scan over each."""
    maps = widened(c) if c["map_precision"] == "tf32" else c
    fold = kernel_of(segments.fold, d, c, types)
    if c["maps"] == "one":
        both = guarded("maps", segments.maps, "ends_again", segments.ends_again, d, maps, types, backend, schedules)
    else:
        both = guarded("ends", segments.ends, "ends_again", segments.ends_again, d, maps, types, backend, schedules)
        transitions = kernel_of(segments.transitions, d, maps, types)
        rows = {**maps, "BV": maps["BM"]}
        own, own_tilelang = scan_schedule(rows), scan_schedule_tilelang(rows)
        both.append(launch_of("transitions", transitions, backend, schedules, own, own_tilelang))
    return [
        *both,
        launch_of("fold", fold, backend, schedules, {"num_warps": 8, "stages": {"segments": 3}}),
        *guarded("scan", segments.segment_scan, "rescan", segments.segment_rescan, d, c, types, backend, schedules),
    ]


def one_kernel(d: Dims, c: Settings, types: Mapping[str, Any], backend: str, schedules: Schedules) -> list[Launch]:
    """prep and scan in one loop."""
    whole = kernel_of(fused.fused, d, c, types)
    launches = [launch_of("fused", whole, backend, schedules, fused_schedule(c), fused_schedule_tilelang(c))]
    if c["guard"]:
        again = kernel_of(fused.fused_again, d, widened(c), types)
        launches.append(
            launch_of("fused_again", again, backend, schedules, fused_schedule(c), fused_schedule_tilelang(c))
        )
    return launches


def fused_schedule(c: Settings) -> dict[str, Any]:
    """Warps that hold the state and a chunk's factors without spills where any number does, and one chunk of loads ahead."""
    wide = c["BV"] > 64 or c["C"] > 16 or c["gram"] == "levels"
    return {"num_warps": 8 if wide else 4, "stages": {"chunks": 2 if c["C"] == 16 else 1}}


def fused_schedule_tilelang(c: Settings) -> dict[str, Any]:
    """A warp group for every 64 rows of the state."""
    return {"threads": max(128, 2 * c["BV"]), "stages": {"chunks": 1}}


def prep_schedule(c: Settings) -> dict[str, Any]:
    """Warps, and a register cap where it pays."""
    levels, full = c["gram"] == "levels", c["gram_dtype"] == f32
    # levels: with 16-bit operands as many warps as leave all 16 rows of a block to one thread
    warps = {16: 4 if full else 2, 32: 4}.get(c["C"], 8) if levels else 2 if c["C"] == 16 else 4
    fields: dict[str, Any] = {"num_warps": warps}
    if c["C"] == 32 and not full and triton_release() < (3, 7):
        # a multiprocessor holds three programs instead of two, or four; newer Triton's code spills more under these caps
        fields["maxnreg"] = 168 if levels else 128
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
    kernel = traced(decode_kernels.decode, d, c, tensors)
    launch = launch_of("decode", kernel, backend, schedules, decode_schedule(c))
    return Plan("kda.decode", d, buffers_of([kernel]), (launch,), knobs, options)
