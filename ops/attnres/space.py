"""The AttnRes ops for the registry: dims, options, knobs with their constraints, and rules for shapes nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3dsl.backends.triton.text import pow2
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.attnres import judge, kernels
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan, buffers_of

MAX_WIDTH = 16384
"""Widest row: it is held in a program's registers in fp32, beside the query."""
MAX_SITES = 256


def _dtypes(options: common.Settings) -> dict[str, Any]:
    """Of the tensors that the one-site kernels share; None leaves one out."""
    io = options["dtype"]
    return {
        "prefix": io,
        "query": options["query_dtype"] or io,
        "key_norm": (options["key_norm_dtype"] or io) if options["key_norm"] else None,
        "norm_weight": (options["norm_dtype"] or io) if options["normed"] else None,
        "h": io if options["h"] else None,
        "normed": io if options["normed"] else None,
        "snapshot": io if options["snapshot"] else None,
    }


def _schedules(knobs: common.Settings, label: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Default schedule fields for Triton and TileLang. A warp group of its own for the copies does not divide a row."""
    triton = {"num_warps": knobs["num_warps"], "stages": {label: knobs["stages"]} if label else {}}
    return triton, {"threads": max(128, 32 * knobs["num_warps"]), "stages": {label: 1} if label else {}}


def site_plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: T tokens, N rows of the bank, D channels, both static."""
    dtypes = _dtypes(options)
    dtypes["bank"] = options["dtype"] if dims["N"] else None
    dtypes["logits"] = f32 if options["logits"] and dims["N"] else None
    if dims["N"] == 0:
        dtypes |= {"query": None, "key_norm": None}
    triton, tilelang = _schedules(knobs, "rows")
    return common.one_launch(
        "attnres.site", kernels.site, dims, knobs, options, dtypes, backend, schedules, strides, triton, tilelang
    )


def merge_plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: T tokens, D channels (static)."""
    dtypes = {**_dtypes(options), "top": f32, "total": f32, "mixed": f32}
    triton, tilelang = _schedules(knobs, None)
    return common.one_launch(
        "attnres.merge", kernels.merge, dims, knobs, options, dtypes, backend, schedules, strides, triton, tilelang
    )


def phase1_plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """norms, score and, with option mix, mix. dims: T tokens, N rows, S sites, D channels, all but T static."""
    schedules, spec = schedules or {}, common.spec_of(strides)
    io = options["dtype"]
    c = {
        **options,
        **knobs,
        "sites": max(16, pow2(dims["S"])),
        "precision": "bf16x3" if io == bf16 else knobs["precision"],
        "mix_width": min(knobs["mix_width"], pow2(dims["D"])),
        "depth": min(knobs["depth"], max(16, pow2(dims["D"]))),
        "rows": 1,
    }
    bank = spec("bank", io)
    queries = spec("queries", options["query_dtype"] or io)
    stages = {"num_warps": 4, "stages": {"width": knobs["stages"]}}
    warps = {"num_warps": knobs["num_warps"]}
    norms = common.traced(kernels.norms, dims, c, {"bank": bank})
    score = common.traced(kernels.score, dims, c, {"bank": bank, "queries": queries})
    launches = [
        common.launch_of("norms", norms, backend, schedules, warps),
        common.launch_of("score", score, backend, schedules, stages),
    ]
    if options["mix"]:
        mix = common.traced(kernels.mix, dims, c, {"bank": bank})
        launches.append(common.launch_of("mix", mix, backend, schedules, warps))
    scratch = ("inv_rms", "logits") if options["mix"] else ()
    buffers = buffers_of([x.kernel for x in launches], scratch=scratch)
    return Plan("attnres.phase1", dims, buffers, tuple(launches), knobs, options)


def row_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused: a program holds its rows in registers, twice in fp32 and some more in 16 bits."""
    held = knobs["rows"] * dims["D"] / (32 * knobs["num_warps"])
    if held > 64:
        return [f"{held:.0f} channels a thread do not fit registers; fewer rows or more warps"]
    if knobs.get("unroll") and dims["N"] > 16:
        return [f"{dims['N']} rows are too many to unroll"]
    return []


def row_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """One token a program, 28 channels a thread at K3's width; short rows in one piece with few warps."""
    warps = next((n for n in (1, 2, 4, 8, 16) if dims["D"] / (32 * n) <= 32), 16)
    return {"num_warps": warps, "width": 1024 if dims["D"] >= 1024 else 512}


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those that mean nothing beside the others set to one value, and dtypes spelled out."""
    o = dict(options)
    for name, used in (("query_dtype", True), ("key_norm_dtype", o.get("key_norm")), ("norm_dtype", o.get("normed"))):
        if name in o:
            o[name] = (o[name] or o["dtype"]) if used else None
    if not o.get("normed", True):
        o |= {"norm_eps": None, "h": True}
    return o


def phase1_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """16 tokens a product for decoding, 64 for more."""
    wide = pow2(max(16, dims["S"])) > 64
    return {"tokens": 16 if dims["T"] <= 64 or wide else 64, "mix_width": 128 if wide else 256}


_TOKENS = Dim("T", 8192, "tokens")
_WIDTH = Dim("D", 7168, "channels", static=True)
_OPTIONS = (
    Option("dtype", (bf16, f16, f32), bf16, "of the rows and of h"),
    Option("query_dtype", (None, bf16, f16, f32), None, "of the query; None: as the rows"),
    Option("eps", (), 1e-5, "of the keys' norm", constant=True),
)
_SITE_OPTIONS = (
    *_OPTIONS,
    Option("key_norm", (True, False), True, "whether there is a key norm, or the query has it folded in"),
    Option("key_norm_dtype", (None, bf16, f16, f32), None, "of the key norm; None: as the rows"),
    Option("normed", (True, False), True, "writes RMSNorm(h) too"),
    Option("norm_dtype", (None, bf16, f16, f32), None, "of that norm's weight; None: as the rows"),
    Option("norm_eps", (), 1e-5, "of that norm", constant=True),
    Option("h", (True, False), True, "writes h"),
    Option("snapshot", (True, False), False, "copies the prefix"),
)
_ROW_KNOBS = (
    Knob("rows", (1, 2, 4), 1, "tokens a program"),
    Knob("width", (512, 1024, 2048, 4096), 1024, "channels of a tile; a row is several of them"),
    Knob("num_warps", (1, 2, 4, 8, 16), 8, "warps a program"),
)

SITE = Op(
    name="attnres.site",
    doc="Block Attention Residuals: mixes the bank's rows and the prefix for one site, with the RMSNorm that follows.",
    dims=(_TOKENS, Dim("N", 8, "rows of the bank", static=True, empty=True), _WIDTH),
    knobs=(
        *_ROW_KNOBS,
        Knob("unroll", (False, True), False, "rows one after the other in the code, instead of a loop"),
        Knob("ahead", (0, 1, 2, 4, 8), 2, "rows whose reads are under way, when unrolled"),
        Knob("stages", (1, 2, 3, 4), 3, "rows in flight in the loop"),
    ),
    options=(*_SITE_OPTIONS, Option("logits", (True, False), False, "takes the bank's logits")),
    plan=site_plan,
    launches=("site",),
    inputs=judge.site_inputs,
    cases=judge.cases,
    call=judge.site_call,
    reference=judge.site_reference,
    mutates=("snapshot",),
    peers=judge.peers,
    limits=judge.limits,
    constraints=row_constraints,
    canonical=canonical,
    heuristic=row_rule,
    cpu_dims={"T": 16},
    seeds=(
        {"unroll": True, "ahead": 1, "num_warps": 8},
        {"unroll": True, "ahead": 2, "num_warps": 16},
        {"num_warps": 4, "stages": 2},
        {"width": 2048, "num_warps": 8},
    ),
)

MERGE = Op(
    name="attnres.merge",
    doc="AttnRes in two phases, the second: merges the prefix into what phase 1 left for a site, with the RMSNorm.",
    dims=(_TOKENS, _WIDTH),
    knobs=_ROW_KNOBS,
    options=_SITE_OPTIONS,
    plan=merge_plan,
    launches=("merge",),
    inputs=judge.merge_inputs,
    call=judge.merge_call,
    reference=judge.merge_reference,
    mutates=("snapshot",),
    peers=lambda: {},
    limits=judge.limits,
    constraints=lambda dims, knobs, options: row_constraints({**dims, "N": 0}, knobs, options),
    canonical=canonical,
    heuristic=row_rule,
    cpu_dims={"T": 16},
)

PHASE1 = Op(
    name="attnres.phase1",
    doc="AttnRes in two phases, the first: all sites of a block against the frozen bank.",
    dims=(
        Dim("T", 64, "tokens"),
        Dim("N", 8, "rows of the bank", static=True, empty=True),
        Dim("S", 24, "sites", static=True),
        _WIDTH,
    ),
    knobs=(
        Knob("tokens", (16, 32, 64, 128), 16, "tokens a program of score"),
        Knob("depth", (32, 64, 128), 128, "channels in one step of score"),
        Knob("stages", (1, 2, 3, 4), 2, "steps of score in flight"),
        Knob("precision", ("ieee", "tf32x3"), "ieee", "products of score where rows are not bf16"),
        Knob("width", (512, 1024, 2048), 1024, "channels of a tile of norms"),
        Knob("mix_width", (128, 256, 512), 256, "channels a program of mix"),
        Knob("num_warps", (2, 4, 8), 4, "warps of norms and mix"),
    ),
    options=(*_OPTIONS, Option("mix", (True, False), True, "mixes, instead of returning logits and inverse rms")),
    plan=phase1_plan,
    launches=("norms", "score", "mix"),
    inputs=judge.phase1_inputs,
    call=judge.phase1_call,
    reference=judge.phase1_reference,
    peers=lambda: {},
    limits=judge.phase1_limits,
    canonical=canonical,
    heuristic=phase1_rule,
    cpu_dims={"T": 8},
)
