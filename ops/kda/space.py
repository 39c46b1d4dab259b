"""The KDA ops for the registry: dims, options, knobs with their constraints, and rules for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3dsl.ir.types import bf16, f16, f32, i32, i64
from k3dsl.ops.common import head_constraints, state_constraints, value_block
from k3dsl.ops.kda import judge, kernels, plans
from k3dsl.ops.kda.check import KEY_WIDTHS, MAX_VALUE_WIDTH
from k3dsl.runtime.op import Dim, Knob, Op, Option

PLACES = 264
"""Programs of a scan that a GPU of 132 multiprocessors holds, two on each."""
LONG = 512
"""Chunks of a sequence from which segments pay for their extra passes: 16384 tokens."""
LEAST_CHUNKS = 16
"""Chunks of a segment at least; the fold's step is about as long as a few chunks of the scan."""
SEGMENTS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 22, 32)
"""Choices of how many parts a sequence is cut into; between 8 and 32 those that fill 264 places from 24, 16, 12 and 8."""
SLICES = (1, 2, 3, 4, 6, 8, 12, 16)

_HEADS = (
    Dim("H", 96, "value heads", static=True),
    Dim("HK", 0, "query and key heads; 0: as many as value heads", static=True),
    Dim("K", 128, "key width", static=True),
    Dim("V", 128, "value width", static=True),
)

_COMMON = (
    Option("dtype", (bf16, f16, f32), bf16, "of q, k, v and o"),
    Option("gate_dtype", (bf16, f16, f32), bf16, "of g"),
    Option("beta_dtype", (bf16, f16, f32), bf16, "of beta"),
    Option(
        "gate", ("bounded", "softplus", "none"), "bounded", "gate activation in the kernel; none: g is the log decay"
    ),
    Option("lower_bound", (), -5.0, "of a bounded gate, nats"),
    Option("A_log", (True, False), True, "whether the gate has a rate A_log"),
    Option("dt_bias", (True, False), True, "whether the gate has a bias"),
    Option("l2norm", (True, False), True, "normalises q and k in the kernel"),
    Option("beta_sigmoid", (True, False), True, "beta is a logit"),
    Option("neg_eigval", (True, False), False, "doubles beta"),
    Option("scale", (), None, "of q; None: 1/sqrt(K)", constant=True),
    Option("v_first", (True, False), False, "states are [V, K] instead of [K, V]"),
)


def forward_dims(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's dims from the op's: HK and N follow from the others where they are 0."""
    d = dict(given)
    d["HK"] = d["HK"] or d["H"]
    if options["varlen"]:
        d["B"] = 1
        d["chunks"] = plans.Sym("chunks", min=1)
    else:
        d["N"] = d["B"]
    return d


def key_constraints(dims: Mapping[str, Any]) -> list[str]:
    """Why keys are of no width that KDA's kernels take."""
    widths = ", ".join(map(str, KEY_WIDTHS))
    known = dims["K"] in KEY_WIDTHS
    return [] if known else [f"K = {dims['K']}, supported are {widths}: pad the head dim with zeros"]


def forward_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = head_constraints(dims)
    reasons += key_constraints(dims)
    reasons += state_constraints(dims, knobs, V=MAX_VALUE_WIDTH)
    if options["dtype"] == f16 and knobs["factors"] == bf16:
        reasons.append("fp16 inputs need fp16 factors")
    if knobs["chunk"] < kernels.ROWS:
        reasons.append(f"a chunk has at least {kernels.ROWS} rows")
    if knobs["segments"] == 1 and knobs["map_precision"] != "factors":
        reasons.append("map_precision is for segments; a scan in one piece has no maps")
    if options["dtype"] == f32 and knobs["map_precision"] == "tf32":
        reasons.append("map_precision tf32 is coarser than fp32 inputs ask for")
    if knobs["slices"] > 1 and (knobs["segments"] > 1 or knobs["form"] == "one"):
        reasons.append("slices are of a scan in one piece that follows prep: set segments=1 and form=two")
    if knobs["form"] == "one" and knobs["segments"] > 1:
        reasons.append(
            "form one carries a whole sequence; segments need the factors that form two keeps: set segments=1"
        )
    return reasons


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those that mean nothing beside the others set to one value."""
    o = dict(options)
    if o["gate"] == "none":
        o |= {"A_log": False, "dt_bias": False}
    if "safe_gate" in o:
        o["safe_gate"] = o["safe_gate"] and o["gate"] == "none"
    if o["gate"] != "bounded" and not o.get("safe_gate"):
        o["lower_bound"] = None
    o["neg_eigval"] = o["neg_eigval"] and o["beta_sigmoid"]
    if "varlen" in o and not o["varlen"]:
        o["cu_dtype"] = None
    return o


def forward_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Chunk 32 everywhere but in fp32, where shared memory asks for 16; V blocks as wide as keep the GPU busy."""
    knobs: dict[str, Any] = {}
    if options["dtype"] == f32:
        knobs |= {"chunk": 16, "block_v": 32}
    else:
        # unnormalised keys make factors of any size, which fp16 cannot hold
        knobs["factors"] = f16 if options["dtype"] == f16 or options["l2norm"] else bf16
        knobs["block_v"] = 64
    knobs["block_v"] = value_block(dims["V"], knobs["block_v"])
    knobs["segments"] = segment_count(dims, knobs)
    if knobs["segments"] > 1:
        knobs["maps"] = "one"
    return knobs


def segment_count(dims: Mapping[str, int], knobs: Mapping[str, Any]) -> int:
    """Parts of a sequence: as many as fill the GPU, of LEAST_CHUNKS at least; 1 for short sequences or many heads.

    All passes over segments together do between two and three times the work of the serial scan, so fewer than four parts
    would gain little."""
    chunks = dims["T"] // max(1, dims["N"] if dims["B"] == 1 else 1) // knobs.get("chunk", 32)
    programs = dims["N"] * dims["H"] * (dims["V"] // knobs["block_v"])
    most = min(PLACES // max(1, programs), chunks // LEAST_CHUNKS)
    if chunks < LONG or most < 4:
        return 1
    return max(n for n in SEGMENTS if n <= most)


def narrow_scan(chunk: int = 32, slices: int = 1, stages: int = 4) -> dict[str, Any]:
    """A seed whose scan goes through TileLang with 64 value columns a program, its products and the rest at the same time."""
    seed = {
        "chunk": chunk,
        "block_v": 64,
        "scan.backend": "tilelang",
        "scan.threads": 128,
        "scan.stages.chunks": stages,
        "scan.overlap": True,
    }
    return {**seed, "segments": 1, "slices": slices} if slices > 1 else seed


FORWARD = Op(
    name="kda.forward",
    doc="Kimi Delta Attention over whole sequences: chunk factors, then the scan of the state.",
    dims=(
        Dim("B", 1, "batch", divisor=1, by_class=True),
        Dim("T", 8192, "tokens of a sequence", by_class=True),
        *_HEADS,
        Dim("N", 1, "packed sequences, with option varlen", divisor=1, by_class=True),
    ),
    knobs=(
        Knob("chunk", (16, 32, 64), 32, "tokens a chunk"),
        Knob("block_v", (16, 32, 64, 128), 64, "value columns a program of the scan carries"),
        Knob("factors", (f16, bf16), f16, "storage of the chunk factors; bf16 is a little faster and less accurate"),
        Knob("inverse", ("doubling", "substitution"), "doubling", "how I + A is inverted"),
        Knob("inverse_precision", ("fp16", "tf32", "ieee"), "fp16", "products inside the inverse"),
        Knob("precision", ("ieee", "tf32x3"), "ieee", "products of fp32 inputs"),
        Knob("approx", (True, False), True, "fast reciprocal in the gate"),
        Knob("vector", (2, 4, 8), 2, "neighbouring channels a thread of prep holds"),
        Knob("form", ("two", "one"), "two", "prep and scan as two kernels, or as one without factors in memory"),
        Knob("segments", SEGMENTS, 1, "parts of a sequence whose states are carried at the same time"),
        Knob(
            "maps",
            ("two", "one"),
            "two",
            "ends and transitions of segments as two kernels or one; nothing without segments",
        ),
        Knob("map_precision", ("factors", "tf32"), "factors", "products of the segments' maps"),
        Knob("slices", SLICES, 1, "parts in time: the scan of one beside prep of those after it"),
    ),
    options=(
        *_COMMON,
        Option("safe_gate", (True, False), False, "a given log decay lies in [lower_bound, 0]"),
        Option("initial_state", (None, f32, bf16), None, "dtype of the initial state"),
        Option("final_state", (None, f32, bf16), f32, "dtype of the final state"),
        Option("varlen", (True, False), False, "packed sequences by cu_seqlens"),
        Option("cu_dtype", (None, i32, i64), i32, "of cu_seqlens"),
    ),
    plan=plans.forward,
    launches=(
        "tables",
        "segment_tables",
        "prep",
        "maps",
        "ends",
        "ends_again",
        "transitions",
        "fold",
        "scan",
        "rescan",
        "fused",
        "fused_again",
    ),
    inputs=judge.forward_inputs,
    cases=judge.forward_cases,
    call=judge.forward_call,
    reference=judge.forward_reference,
    peers=judge.forward_peers,
    limits=judge.forward_limits,
    constraints=forward_constraints,
    traffic_bytes=judge.forward_traffic,
    canonical=canonical,
    heuristic=forward_rule,
    prepare_dims=forward_dims,
    cpu_dims={"T": 1024, "H": 4},
    seeds=(
        {"chunk": 32, "block_v": 128, "scan.backend": "tilelang", "scan.threads": 256, "scan.stages.chunks": 3},
        narrow_scan(),
        narrow_scan(slices=4),
        narrow_scan(slices=8),
        narrow_scan(chunk=16, slices=6),
        narrow_scan(slices=3),
        narrow_scan(chunk=64, stages=2),
        {"maps": "one"},
        {"chunk": 16},
        {"segments": 4},
        {"segments": 4, "maps": "one"},
        {"form": "one", "segments": 1, "chunk": 16, "block_v": 128},
        {"form": "one", "segments": 1, "chunk": 16},
    ),
)


def decode_dims(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's dims from the op's: HK follows from H where it is 0."""
    return {**given, "HK": given["HK"] or given["H"]}


def decode_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    return head_constraints(dims) + key_constraints(dims) + state_constraints(dims, knobs, V=MAX_VALUE_WIDTH)


def decode_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """8 rows of a [V, K] state a program, one warp; 64 columns of a [K, V] one, fewer where the GPU would not fill."""
    block = value_block(dims["V"], 8 if options["v_first"] else 64, 8)
    while block > 16 and dims["B"] * dims["H"] * (dims["V"] // block) < 512:
        block //= 2
    return {"block_v": block}


DECODE = Op(
    name="kda.decode",
    doc="Kimi Delta Attention for one token of every request, state in place.",
    dims=(Dim("B", 64, "requests", divisor=1), *_HEADS, Dim("slots", 64, "slots of the state pool", divisor=1)),
    knobs=(Knob("block_v", (8, 16, 32, 64, 128), 32, "value columns a program updates"),),
    options=(
        *_COMMON,
        Option("state", (f32, bf16), f32, "dtype of the state"),
        Option("indexed", (True, False), True, "slots by state_indices"),
        Option("in_place", (True, False), True, "updates the pool instead of writing new states"),
    ),
    plan=plans.decode,
    launches=("decode",),
    inputs=judge.decode_inputs,
    cases=judge.decode_cases,
    call=judge.decode_call,
    reference=judge.decode_reference,
    mutates=("state",),
    peers=judge.decode_peers,
    limits=judge.decode_limits,
    constraints=decode_constraints,
    traffic_bytes=judge.decode_traffic,
    canonical=canonical,
    heuristic=decode_rule,
    prepare_dims=decode_dims,
    cpu_dims={"B": 4, "H": 8},
)
