"""The MLA ops for the registry: dims, options, knobs with their constraints, and rules for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.ir.symbols import Sym
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.mla import judge, plans
from k3dsl.ops.mla.check import MAX_LATENT, MAX_TOKENS, MAX_WIDTH
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.targets import Target, device_facts

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 66, 96, 132)
"""Choices of how many parts the keys of a request are cut into; 66 and 132 fill an H200 from two programs and from one."""
LEAST_BLOCKS = 4
"""Blocks of keys of a split at least, where the page table has room for as many."""
L2_SHARE = 24 << 20
"""Bytes of keys and values that heads which run together may have, so that they stay in a 50 MB L2 cache."""

_DTYPE = Option("dtype", (bf16, f16, f32), bf16, "of the tensors; sums and softmax are fp32")
_SCALE = Option("scale", (), None, "of the scores; None: 1/sqrt(192)", constant=True, positive=True)
_LATENT = (
    Dim("C", 512, "width of the latent (kv_lora_rank)", static=True),
    Dim("E", 64, "width of the shared key", static=True),
    Dim("page", 64, "tokens of a page of the cache", static=True),
)


# ---- prefill -------------------------------------------------------------------------------------------------------------


def prefill_dims(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """S follows from T where it is 0; packed sequences have B = 1 and a block table."""
    d = dict(given)
    if isinstance(given["S"], int) and not given["S"]:
        d["S"] = given["T"]
    if options["varlen"]:
        d["B"], d["blocks"] = 1, Sym("blocks", min=1)
    else:
        d["N"] = 1
    return d


def prefill_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    group = knobs["head_group"]
    uneven = [f"head_group {group} does not divide H = {dims['H']}"] if dims["H"] % group else []
    return common.width_constraints(dims, D=MAX_WIDTH, E=MAX_WIDTH, V=MAX_WIDTH) + uneven


def prefill_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Blocks that fit shared memory, small ones for few queries and for fp32; as many heads at once as L2 holds keys of."""
    bytes_a_head = max(1, dims["S"] // max(1, dims["N"]) * (dims["D"] + dims["V"]) * options["dtype"].bytes)
    group = 1
    while dims["H"] % (2 * group) == 0 and 2 * group <= 16 and 2 * group * bytes_a_head <= L2_SHARE:
        group *= 2
    queries = dims["T"] // max(1, dims["N"])
    if options["dtype"] == f32:
        return {"block_q": 32, "block_k": 16, "num_warps": 8, "stages": 1, "head_group": group}
    if queries <= 64:
        return {"block_q": 16 if queries <= 16 else 64, "num_warps": 4, "stages": 2, "head_group": group}
    return {"head_group": group}


PREFILL = Op(
    name="mla.prefill",
    doc="Gated MLA over whole sequences, expanded: causal attention with one key part shared by all heads, output gate.",
    dims=(
        Dim("B", 1, "batch", divisor=1),
        Dim("T", 8192, "queries; of all sequences together with option varlen"),
        Dim("S", 0, "keys; 0: as many as queries"),
        Dim("H", 96, "heads", static=True),
        Dim("D", 128, "width of a head's own part of queries and keys", static=True),
        Dim("E", 64, "width of the shared key", static=True),
        Dim("V", 128, "width of values", static=True),
        Dim("N", 1, "packed sequences, with option varlen", divisor=1),
    ),
    knobs=(
        Knob("block_q", (16, 32, 64, 128, 256), 128, "queries a program"),
        Knob("block_k", (16, 32, 64, 128), 64, "keys in one step"),
        Knob("head_group", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96), 1, "heads that run side by side"),
        Knob("num_warps", (1, 2, 4, 8, 16), 8, "warps a program"),
        Knob("stages", (1, 2, 3, 4), 3, "steps in flight"),
    ),
    options=(
        _DTYPE,
        Option("causal", (True, False), True, "hides the keys after a query"),
        _SCALE,
        Option("lse", (True, False), False, "writes the log-sum-exp"),
        Option("gate", (True, False), True, "multiplies the output by sigmoid(gate)"),
        Option("varlen", (True, False), False, "packed sequences by cu_seqlens"),
        Option("packed", (True, False), True, "k_nope and v are the halves of one tensor [B, S, H, D+V]"),
    ),
    plan=plans.prefill,
    launches=("blocks", "ordered", "mla_prefill"),
    inputs=judge.prefill_inputs,
    cases=judge.prefill_cases,
    call=judge.prefill_call,
    reference=judge.prefill_reference,
    peers=judge.prefill_peers,
    limits=judge.prefill_limits,
    flops=judge.prefill_flops,
    constraints=prefill_constraints,
    heuristic=prefill_rule,
    prepare_dims=prefill_dims,
    cpu_dims={"T": 256, "H": 4},
    seeds=(
        {"block_q": 128, "block_k": 128, "num_warps": 8, "stages": 2},
        {"block_q": 128, "block_k": 64, "num_warps": 8, "stages": 2},
        {"block_q": 64, "block_k": 64, "num_warps": 4, "stages": 3},
    ),
)


# ---- decode --------------------------------------------------------------------------------------------------------------


def multiprocessors() -> int:
    """Of the current GPU; without one, an H200's."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
    facts = device_facts("H200")
    assert facts is not None
    return facts.sm_count


def splits_for(programs: int, keys: int, block_n: int, places: int) -> int:
    """The fewest splits that keep a GPU with room for `places` programs nearly as busy as any number of splits does.

    programs: of one split. keys: that a request has room for. Busy is the share of places in use over whole waves.
    """
    most = max(1, keys // (block_n * LEAST_BLOCKS))
    allowed = [s for s in SPLITS if s <= most]

    def busy(splits: int) -> float:
        return programs * splits / (-(-programs * splits // places) * places)

    best = max(map(busy, allowed))
    return next(s for s in allowed if busy(s) >= 0.9 * best)


def decode_dims(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's dims from the op's."""
    return plans.table_dims(given)


def cache_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why there is no such cache."""
    odd = dims["page"] % 16 or not dims["page"]
    pages = [f"page = {dims['page']} tokens, needs a multiple of 16"] if odd else []
    return common.width_constraints(dims, C=MAX_LATENT, E=MAX_WIDTH) + pages


def decode_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = cache_constraints(dims, knobs, options)
    if not 1 <= dims["T"] <= MAX_TOKENS:
        reasons.append(f"T = {dims['T']} new tokens, needs 1 to {MAX_TOKENS}; use mla.prefill for more")
    if knobs["block_h"] * dims["C"] > 64 * 512:
        reasons.append(f"{knobs['block_h']} rows of C = {dims['C']} sums do not fit a program's registers")
    return reasons


def decode_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Blocks of 16 rows up to 32 rows, two of which share a multiprocessor and read the same latents, blocks of 64 for more;
    splits that fill the GPU."""
    rows = dims["T"] * dims["H"]
    if options["dtype"] == f32:
        knobs = {"block_h": 16, "block_n": 16, "num_warps": 8, "stages": 1}
    else:
        knobs = {"block_h": 16, "num_warps": 4} if rows <= 32 else {"block_h": 64, "num_warps": 8}
        if dims["page"] % 32:
            knobs |= {"block_n": 16, "stages": 5}
        elif rows > 16 and dims["page"] % 64 == 0:
            knobs |= {"block_n": 64, "stages": 2}
    # 16 rows leave shared memory for a second program on a multiprocessor
    places = multiprocessors() * (2 if knobs["block_h"] < 64 and options["dtype"] != f32 else 1)
    programs = max(1, dims["B"] * -(-rows // knobs["block_h"]))
    return knobs | {"num_splits": splits_for(programs, dims["S"], knobs.get("block_n", 32), places)}


def decode_fit(options: Mapping[str, Any], dims: Mapping[str, int], target: Target) -> dict[str, Any]:
    """The narrow blocks of few rows for more rows too, where shared memory does not hold 64 rows of queries beside keys."""
    wide = decode_rule(options, dims)
    held = (wide["block_h"] + wide.get("block_n", 32)) * (dims["C"] + dims["E"]) * options["dtype"].bytes
    if held <= target.shared_per_block:
        return {}
    few = {"block_n": 32, "stages": 3} | decode_rule(options, {**dims, "T": 1, "H": 16})
    programs = max(1, dims["B"] * -(-dims["T"] * dims["H"] // few["block_h"]))
    return few | {"num_splits": splits_for(programs, dims["S"], few["block_n"], multiprocessors())}


def decode_cpu_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """One program for the keys of a request, in the largest blocks that divide a page, through one loop."""
    block = next((n for n in (128, 64, 32) if dims["page"] % n == 0), 16)
    return {"num_splits": 1, "block_n": block, "tail": "masked"}


DECODE = Op(
    name="mla.decode",
    doc="MLA for the newest tokens of every request, absorbed: attention over a paged cache of latents, split over keys.",
    dims=(
        Dim("B", 32, "requests", divisor=1),
        Dim("T", 1, "new tokens of a request", static=True),
        Dim("H", 96, "heads", static=True),
        Dim("S", 8192, "keys that a request's row of the page table has room for"),
        *_LATENT,
    ),
    knobs=(
        Knob("block_h", (16, 32, 64), 64, "rows (head and token) a program"),
        Knob("block_n", (16, 32, 64, 128), 32, "keys in one step"),
        Knob("num_splits", SPLITS, 1, "parts of a request's keys; one writes the result without a second launch"),
        Knob("tail", ("apart", "masked"), "apart", "a loop of its own for the last block, or every block masked"),
        Knob("num_warps", (1, 2, 4, 8, 16), 8, "warps a program"),
        Knob("stages", (1, 2, 3, 4, 5, 6), 3, "steps in flight"),
    ),
    options=(
        _DTYPE,
        Option("causal", (True, False), True, "hides later new tokens from a new token"),
        _SCALE,
        Option("lse", (True, False), False, "writes the log-sum-exp"),
    ),
    plan=plans.decode,
    launches=("mla_decode", "mla_combine"),
    inputs=judge.decode_inputs,
    cases=judge.decode_cases,
    call=judge.decode_call,
    reference=judge.decode_reference,
    peers=judge.decode_peers,
    limits=judge.decode_limits,
    flops=judge.decode_flops,
    constraints=decode_constraints,
    heuristic=decode_rule,
    cpu_heuristic=decode_cpu_rule,
    fit=decode_fit,
    prepare_dims=decode_dims,
    cpu_dims={"B": 2, "H": 8, "S": 512},
    seeds=(
        {"block_h": 64, "block_n": 64, "num_warps": 8, "stages": 2, "mla_decode.backend": "tilelang"},
        {"block_h": 64, "block_n": 32, "num_warps": 8, "stages": 3, "mla_decode.backend": "tilelang"},
        {"block_h": 16, "block_n": 64, "num_warps": 4, "stages": 2},
        {"block_n": 64, "stages": 2},
        {"block_n": 32, "stages": 4},
        {"tail": "masked"},
    ),
)


# ---- cache write ---------------------------------------------------------------------------------------------------------

CACHE_WRITE = Op(
    name="mla.cache_write",
    doc="Writes latents and shared keys into the slots of a paged MLA cache, RMSNorm of the latent on the way if asked.",
    dims=(Dim("N", 8192, "tokens"), *_LATENT, Dim("pages", 256, "pages of the cache", divisor=1)),
    knobs=(Knob("num_warps", (1, 2, 4, 8), 1, "warps a token"),),
    options=(
        _DTYPE,
        Option("norm", (True, False), True, "normalises the latent on the way"),
        Option("weight_dtype", (None, bf16, f16, f32), None, "of the norm's weight; None: as the latent"),
        Option("eps", (), 1e-6, "added to the mean of squares", constant=True),
    ),
    plan=plans.cache_write,
    launches=("mla_cache_write",),
    inputs=judge.write_inputs,
    cases=judge.write_cases,
    call=judge.write_call,
    reference=judge.write_reference,
    mutates=("kv_cache",),
    limits=judge.write_limits,
    constraints=cache_constraints,
    traffic_bytes=judge.write_traffic,
    cpu_dims={"N": 256, "pages": 8},
)
