"""The MoE ops for the registry: dims, options, knobs with their constraints, and rules for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3dsl.ir.types import bf16, f16, f32, i32, i64
from k3dsl.ops.common import covering
from k3dsl.ops.moe import judge, plans
from k3dsl.runtime.op import Dim, Knob, Op, Option

_CHOICE = (
    Option("bias", (True, False), True, "an fp32 bias that counts in the selection only"),
    Option("scoring", ("sigmoid", "softmax"), "sigmoid", "scores from logits"),
    Option("renormalize", (True, False), True, "divides the chosen scores by their sum"),
    Option("scale", (), 1.0, "of the weights", constant=True),
)
_ACTIVATION = (
    Option("activation", ("situ", "silu"), "situ", "of gate and up"),
    Option("beta", (), 4.0, "where SiTU's gate saturates", constant=True, positive=True),
    Option("linear_beta", (), 25.0, "where SiTU's linear factor saturates", constant=True, positive=True),
)
_ROWS = Knob("rows", (1, 2, 4, 8), 4, "tokens whose experts a program selects, and its warps")
_CHUNK = Knob("chunk", (16, 64, 128, 256, 512, 1024), 128, "pairs that a program of the sort counts")
_IDS = Option("ids_dtype", (i32, i64), i32, "of the ids")
H200_PROGRAMS = 132


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


# ---- situ --------------------------------------------------------------------------------------------------------------


def situ_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Blocks of columns no wider than the tensor; several rows where they are short."""
    block = min(1024, max(64, _pow2(dims["I"])))
    return {"block": block, "rows": max(1, min(8, 1024 // block)), "num_warps": 4}


def situ_cpu_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """No rows that are not there."""
    return {"rows": covering((1, 2, 4, 8), dims["R"])} if dims["R"] <= 8 else {}


def situ_canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """SwiGLU has no betas."""
    return {**options, **({"beta": 4.0, "linear_beta": 25.0} if options["activation"] == "silu" else {})}


SITU = Op(
    name="moe.situ",
    doc="SiTU-GLU (or SwiGLU) of a gate and a linear tensor, and its backward pass.",
    dims=(Dim("R", 8192, "rows"), Dim("I", 6144, "columns")),
    knobs=(
        Knob("rows", (1, 2, 4, 8), 1, "rows a program computes"),
        Knob("block", (64, 128, 256, 512, 1024, 2048, 4096), 1024, "columns a program computes"),
        Knob("num_warps", (1, 2, 4, 8), 4, "warps a program"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of all tensors"),
        *_ACTIVATION,
        Option("backward", (True, False), False, "gradients from that of the output"),
    ),
    plan=plans.situ,
    launches=("situ", "situ_backward"),
    inputs=judge.situ_inputs,
    call=judge.situ_call,
    reference=judge.situ_reference,
    peers=judge.situ_peers,
    limits=judge.situ_limits,
    canonical=situ_canonical,
    heuristic=situ_rule,
    cpu_heuristic=situ_cpu_rule,
    cpu_dims={"R": 256, "I": 512},
)


# ---- choosing experts --------------------------------------------------------------------------------------------------


def topk_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """One token and one warp a program where tokens are few."""
    return {"rows": 4 if dims["T"] >= 512 else 1}


def choice_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    E, K = dims["E"], dims["K"]
    return [f"top_k K = {K} of E = {E} experts"] if not 1 <= K <= E else []


TOPK = Op(
    name="moe.topk",
    doc="The top_k best experts by score + bias from router logits, and their weights.",
    dims=(
        Dim("T", 8192, "tokens"),
        Dim("E", 896, "experts", static=True),
        Dim("K", 16, "experts a token takes", static=True),
    ),
    knobs=(_ROWS,),
    options=_CHOICE,
    plan=plans.topk,
    launches=("topk",),
    inputs=judge.topk_inputs,
    cases=judge.topk_cases,
    call=judge.topk_call,
    reference=judge.topk_reference,
    peers=judge.topk_peers,
    limits=judge.topk_limits,
    constraints=choice_constraints,
    heuristic=topk_rule,
    cpu_dims={"T": 256},
)


def router_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Blocks as wide as the tokens are many; D in pieces until every multiprocessor has a program."""
    T, E, D = dims["T"], dims["E"], dims["D"]
    block_t = next((n for n in (16, 32, 64) if n >= T), 128 if T >= 2048 else 64)
    block_e = 128 if block_t == 128 else 64
    programs = -(-T // block_t) * -(-E // block_e)
    splits = 1
    while splits < 16 and programs * splits < H200_PROGRAMS and D // (64 * 2 * splits) >= 4:
        splits *= 2
    wide = block_t == 128 or options["dtype"] == f32
    return {
        **topk_rule(options, dims),
        "block_t": block_t,
        "block_e": block_e,
        "block_k": 32 if options["dtype"] == f32 else 64,
        "splits": splits,
        "num_warps": 8 if wide and block_e == 128 else 4,
    }


def router_cpu_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """D in few steps, in one piece."""
    return {"block_k": covering((32, 64, 128), dims["D"]), "splits": 1}


def router_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = choice_constraints(dims, knobs, options)
    accumulators = knobs["block_t"] * knobs["block_e"] // (knobs["num_warps"] * 32)
    if accumulators > 128:
        reasons.append(f"{accumulators} accumulators a thread leave no registers for the parts of the weight")
    return reasons


ROUTER = Op(
    name="moe.router",
    doc="Router logits as exact as fp32 sums, sigmoid, selection with a bias, weights without it.",
    dims=(
        Dim("T", 8192, "tokens"),
        Dim("D", 7168, "width of a token", static=True),
        Dim("E", 896, "experts", static=True),
        Dim("K", 16, "experts a token takes", static=True),
    ),
    knobs=(
        Knob("block_t", (16, 32, 64, 128), 64, "tokens a program multiplies"),
        Knob("block_e", (64, 128), 64, "experts a program multiplies"),
        Knob("block_k", (32, 64, 128), 64, "columns in one step"),
        Knob("splits", (1, 2, 4, 8, 16), 1, "pieces of D, summed in order by the selection"),
        Knob("num_warps", (4, 8), 4, "warps a program of the logits"),
        Knob("stages", (1, 2, 3, 4), 3, "steps in flight"),
        _ROWS,
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of x"),
        Option("weight_dtype", (f32, bf16, f16), f32, "of the router's weight"),
        *_CHOICE,
    ),
    plan=plans.router,
    launches=("logits", "topk"),
    inputs=judge.router_inputs,
    cases=judge.router_cases,
    call=judge.router_call,
    reference=judge.router_reference,
    peers=judge.router_peers,
    limits=judge.topk_limits,
    flops=judge.router_flops,
    constraints=router_constraints,
    heuristic=router_rule,
    cpu_heuristic=router_cpu_rule,
    cpu_dims={"T": 64, "D": 512},
    seeds=(
        {"block_t": 128, "block_e": 64, "num_warps": 8},
        {"block_t": 64, "block_e": 128, "num_warps": 8, "splits": 2},
    ),
)


# ---- sorting -----------------------------------------------------------------------------------------------------------


def chunk_rule(dims: Mapping[str, int]) -> int:
    """Short chunks keep a small sort quick; long ones keep the table that one program walks short."""
    pairs = dims["T"] * dims["K"]
    return 16 if pairs <= 16 else 128 if pairs <= 16384 else 512


SORT = Op(
    name="moe.sort",
    doc="Pairs of tokens and experts in the order of their experts, stable, and a table of row blocks.",
    dims=(
        Dim("T", 8192, "tokens", divisor=1),
        Dim("E", 896, "experts", static=True),
        Dim("K", 16, "experts a token takes", static=True),
    ),
    knobs=(_CHUNK,),
    options=(Option("block_m", (16, 32, 64, 128, 192, 256), 64, "rows of a block"), _IDS),
    plan=plans.sort,
    launches=("count", "offsets", "place"),
    inputs=judge.sort_inputs,
    call=judge.sort_call,
    reference=judge.sort_reference,
    peers=judge.sort_peers,
    limits=judge.sort_limits,
    heuristic=lambda options, dims: {"chunk": chunk_rule(dims)},
    cpu_dims={"T": 64},
)


# ---- experts -----------------------------------------------------------------------------------------------------------


def experts_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = []
    accumulators = 2 * knobs["block_m"] * knobs["block_n"] // (knobs["num_warps"] * 32)
    if accumulators > 192:
        reasons.append(f"{accumulators} accumulators a thread, of gate and up, do not fit the registers")
    if options["weights"] == "mxfp4":
        if options["dtype"] != bf16:
            reasons.append("MXFP4 weights become bf16, and so are multiplied with bf16 tokens")
        if dims["D"] % 32 or dims["I"] % 32:
            reasons.append(f"MXFP4 weights come in groups of 32 columns, and D = {dims['D']}, I = {dims['I']}")
    return reasons


IN_LANE_ORDER: dict[str, Any] = {
    "lane_order": True,
    "gather": "before",
    "swap_ab": True,
    "block_n": 128,
    "block_k": 128,
}
"""Packed weights as the operand in registers; 8 warps read 256 columns at a time, or have to exchange them."""


def experts_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Blocks about as high as an expert has rows, so that little of them is padding. Few rows are put on the narrow side of
    the instruction (swap_ab), which then reads weights into its tall side; so are all rows where packed weights
    come to that side in lane order. Dequantising pays in high blocks."""
    rows = -(-dims["T"] * dims["K"] // (dims["E"] * options["ranks"]))
    packed = options["weights"] == "mxfp4"
    few = 16 if rows <= 16 else 32
    if options["dtype"] == f32:
        knobs: dict[str, Any] = {"block_m": few, "block_n": 64, "block_k": 32, "num_warps": 4, "stages": 2}
    elif rows <= 48:
        knobs = {"block_m": few, "block_n": 64, "block_k": 128, "num_warps": 4, "swap_ab": True}
    else:
        tall = rows > 256
        knobs = {"block_m": 128 if tall else 64, "block_n": 128, "block_k": 128 if packed else 64, "num_warps": 8}
        knobs["stages"] = 3 if tall or packed else 4
    if packed and options["dtype"] != f32 and plans.whole_runs(dims):
        knobs |= IN_LANE_ORDER
        if knobs["block_m"] == 64:
            knobs |= {"block_k": 256, "stages": 2}
    narrow = min(dims["D"], dims["I"])
    if knobs["block_n"] > narrow:
        knobs |= {"block_n": 64 if narrow > 32 else 32, "num_warps": 4}
    knobs["block_d"] = min(4096, max(128, _pow2(dims["D"])))
    return {**knobs, "chunk": chunk_rule(dims)}


def experts_cpu_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Few steps, blocks of columns without padding where there are any, and no order for lanes that are not there."""
    D, I = dims["D"], dims["I"]
    whole = [n for n in (32, 64, 128, 256) if D % n == 0 == I % n]
    block_n = max(whole) if whole else covering((32, 64, 128, 256), max(D, I))
    few = {"block_n": block_n, "block_k": covering((32, 64, 128), max(D, I))}
    return {**few, "lane_order": False, "gather": "inside"}


def experts_canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """SwiGLU has no betas, and only fp32 products have a precision."""
    o = situ_canonical(options)
    return o if o["dtype"] == f32 else {**o, "precision": "ieee"}


INSIDE = {"swap_ab": False, "lane_order": False, "gather": "inside"}
GATHERED = {
    **INSIDE,
    "gather": "before",
    "gate_up.descriptors": ("xs", "w_gate", "w_up"),
    "down.descriptors": ("h", "w_down"),
}
"""Every operand of the products by the tensor memory accelerator."""


def through_tilelang(threads: int) -> dict[str, Any]:
    """Both grouped products through TileLang, of rows that are gathered already: its copies bring in all operands."""
    fields = {"backend": "tilelang", "threads": threads, "overlap": True}
    products = {f"{label}.{name}": value for label in ("gate_up", "down") for name, value in fields.items()}
    return {**INSIDE, "gather": "before", "num_warps": 8, **products}


EXPERTS = Op(
    name="moe.experts",
    doc="Routed experts: sort, grouped gate and up products with their activation, grouped down product, weighted sum.",
    dims=(
        Dim("T", 1024, "tokens", divisor=1),
        Dim("E", 112, "experts; 112 of 896 are what one GPU of eight holds", static=True),
        Dim("K", 16, "experts a token takes", static=True),
        Dim("D", 3584, "width of a token", static=True),
        Dim("I", 3072, "width between the products", static=True),
    ),
    knobs=(
        Knob("block_m", (16, 32, 64, 128, 192, 256), 64, "rows a program computes"),
        Knob("block_n", (32, 64, 128, 256), 128, "columns a program computes"),
        Knob("block_k", (32, 64, 128, 256), 64, "columns of a row in one step"),
        Knob("group", (1, 2, 4, 8, 16), 1, "row blocks that run together through a block of columns"),
        Knob("gather", ("inside", "before"), "inside", "who brings tokens' rows by expert: the products, or a launch"),
        Knob("swap_ab", (False, True), False, "weights are the tall operand of the instruction, tokens the narrow one"),
        Knob(
            "lane_order",
            (False, True),
            False,
            "packed weights' columns in the order of the lanes that read them, where gather=before and blocks of 128 allow it",
            means=lambda options: options["weights"] == "mxfp4",
        ),
        Knob("wide_down", (False, True), False, "the down product, of one sum, takes twice the columns"),
        Knob("num_warps", (2, 4, 8), 8, "warps a program of the products"),
        Knob("stages", (1, 2, 3, 4, 5), 3, "steps in flight"),
        Knob("block_d", (128, 256, 512, 1024, 2048, 4096), 4096, "columns a program of the sum computes"),
        _CHUNK,
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of tokens, weights and output"),
        Option("weights", ("plain", "mxfp4"), "plain", "how weights are stored"),
        *_ACTIVATION,
        Option("precision", ("ieee", "tf32x3", "tf32"), "ieee", "how fp32 products are formed"),
        _IDS,
        Option("ranks", (), 1, "ranks that share the router's experts: one choice in so many is an expert here"),
    ),
    plan=plans.experts,
    launches=("count", "offsets", "place", "gather", "gate_up", "down", "combine"),
    inputs=judge.experts_inputs,
    cases=judge.experts_cases,
    call=judge.experts_call,
    reference=judge.experts_reference,
    peers=judge.experts_peers,
    limits=judge.experts_limits,
    flops=judge.experts_flops,
    constraints=experts_constraints,
    traffic_bytes=judge.experts_traffic,
    canonical=experts_canonical,
    heuristic=experts_rule,
    cpu_heuristic=experts_cpu_rule,
    cpu_dims={"T": 64, "E": 16, "K": 4, "D": 128, "I": 96},
    seeds=(
        {**IN_LANE_ORDER, "block_m": 64, "num_warps": 4, "stages": 3},
        {**IN_LANE_ORDER, "block_m": 128, "num_warps": 8, "stages": 3},
        {**IN_LANE_ORDER, "block_m": 64, "block_k": 256, "num_warps": 8, "stages": 2},
        {**IN_LANE_ORDER, "block_m": 32, "block_k": 256, "num_warps": 8, "stages": 3},
        {"block_m": 192, "block_n": 128, "block_k": 64, "stages": 4, **through_tilelang(384)},
        {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 4, "wide_down": True, **through_tilelang(256)},
        {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "stages": 4, **GATHERED},
        {**INSIDE, "block_m": 64, "block_n": 256, "block_k": 64, "num_warps": 8, "stages": 3},
        {**INSIDE, "block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "stages": 3, "group": 2},
        {**INSIDE, "block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 4, "stages": 3},
        {**INSIDE, "block_m": 32, "block_n": 128, "block_k": 128, "num_warps": 4, "stages": 3, "swap_ab": True},
    ),
)
