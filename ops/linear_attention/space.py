"""The three ops and their one-token forms for the registry: dims, options, knobs, rules for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from k3dsl.ir.types import bf16, f16, f32, i32, i64
from k3dsl.ops.common import head_constraints, state_constraints, value_block
from k3dsl.ops.kda.space import decode_dims, decode_rule, forward_dims
from k3dsl.ops.linear_attention import judge, plans
from k3dsl.ops.linear_attention.check import MAX_WIDTH
from k3dsl.runtime.op import Dim, Knob, Op, Option

_FLOATS = (bf16, f16, f32)
_HEADS = (
    Dim("H", 32, "value heads", static=True),
    Dim("HK", 0, "query and key heads; 0: as many as value heads", static=True),
    Dim("K", 128, "key width", static=True),
    Dim("V", 128, "value width", static=True),
)
_DTYPE = Option("dtype", _FLOATS, bf16, "of q, k, v and o")
_COMMON = (
    Option("scale", (), None, "of q; None: 1/sqrt(K)", constant=True),
    Option("v_first", (True, False), False, "states are [V, K] instead of [K, V]"),
)
_GATE = Option("g_dtype", _FLOATS, f32, "of the log decay g")
_BETA = Option("beta_dtype", _FLOATS, bf16, "of beta")
_NORM = Option("l2norm", (True, False), True, "normalises q and k in the kernel")
_SEQUENCES = (
    Option("initial_state", (None, f32, bf16), None, "dtype of the initial state"),
    Option("final_state", (None, f32, bf16), f32, "dtype of the final state"),
    Option("varlen", (True, False), False, "packed sequences by cu_seqlens"),
    Option("cu_dtype", (None, i32, i64), i32, "of cu_seqlens"),
)
_OPTIONS = {
    "linear_attention": (),
    "delta_rule": (_BETA, _NORM),
    "gated_delta_rule": (_GATE, _BETA, _NORM),
}
_DOCS = {
    "linear_attention": "Causal linear attention: S <- S + k v^T, o = S^T q",
    "delta_rule": "The delta rule: S <- S + beta k (v - S^T k)^T, o = S^T q",
    "gated_delta_rule": "The gated delta rule: S <- exp(g) S first, one g a head",
}


def _state(dims: Mapping[str, Any], knobs: Mapping[str, Any]) -> list[str]:
    return state_constraints(dims, knobs, K=MAX_WIDTH, V=MAX_WIDTH)


def constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = head_constraints(dims)
    reasons += _state(dims, knobs)
    if options["dtype"] == f16 and knobs.get("factors") == bf16:
        reasons.append("fp16 inputs need fp16 factors")
    return reasons


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Chunks of 32, of 16 where wide keys or fp32 fill registers; V blocks that keep the GPU busy."""
    full = options["dtype"] == f32
    wide = dims["K"] > 128
    knobs: dict[str, Any] = {"chunk": 16 if full or wide else 32}
    knobs["block_v"] = 32 if full or wide else 64
    knobs["block_v"] = value_block(dims["V"], knobs["block_v"])
    if "l2norm" in options and not full:
        # unnormalised keys make factors of any size, which fp16 cannot hold
        knobs["factors"] = f16 if options["dtype"] == f16 or options["l2norm"] else bf16
        knobs["inverse_precision"] = "fp16" if options["l2norm"] else "tf32"
    return knobs


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those that mean nothing beside the others set to one value."""
    return {**options, "cu_dtype": options["cu_dtype"] if options["varlen"] else None}


_BLOCK_V = Knob("block_v", (16, 32, 64, 128), 64, "value columns a program carries the state of")
_CHUNK = Knob("chunk", (16, 32, 64), 32, "tokens a chunk")
_PRECISION = Knob("precision", ("ieee", "tf32x3"), "ieee", "products of fp32 inputs")
_DELTA_KNOBS = (
    _CHUNK,
    _BLOCK_V,
    Knob("factors", (f16, bf16), f16, "storage of the chunk factors; bf16 is a little faster and less accurate"),
    Knob("inverse", ("doubling", "substitution"), "doubling", "how I + A is inverted"),
    Knob("inverse_precision", ("fp16", "tf32", "ieee"), "fp16", "products inside the inverse"),
    _PRECISION,
)
_LINEAR_KNOBS = (
    _CHUNK,
    _BLOCK_V,
    Knob("state_parts", (1, 2), 2, "bf16 numbers that the state is to a product; 1 is faster and less accurate"),
    Knob("stages", (1, 2, 3, 4), 2, "chunks in flight"),
    _PRECISION,
)


def _forward(name: str) -> Op:
    is_linear = name == "linear_attention"
    plan: Callable[..., Any] = plans.linear if is_linear else plans.delta
    normalize = (Option("normalize", (True, False), False, "divides by the sum of scores"),) if is_linear else ()
    return Op(
        name=name,
        doc=f"{_DOCS[name]}; over whole sequences.",
        dims=(
            Dim("B", 1, "batch", divisor=1, by_class=True),
            Dim("T", 8192, "tokens of a sequence", by_class=True),
            *_HEADS,
            Dim("N", 1, "packed sequences, with option varlen", divisor=1, by_class=True),
        ),
        knobs=_LINEAR_KNOBS if is_linear else _DELTA_KNOBS,
        options=(_DTYPE, *_OPTIONS[name], *_COMMON, *normalize, *_SEQUENCES),
        plan=partial(plan, name),
        launches=("linear",) if is_linear else ("tables", "prep", "scan", "rescan"),
        inputs=partial(judge.forward_inputs, name),
        cases=partial(judge.forward_cases, name),
        call=partial(judge.forward_call, name),
        reference=judge.forward_reference,
        peers=partial(judge.forward_peers, name),
        limits=judge.forward_limits,
        constraints=constraints,
        canonical=canonical,
        heuristic=rule,
        prepare_dims=forward_dims,
        cpu_dims={"T": 256, "H": 2},
    )


def _decode(name: str) -> Op:
    return Op(
        name=f"{name}.decode",
        doc=f"{_DOCS[name]}; for one token of every request.",
        dims=(Dim("B", 64, "requests", divisor=1), *_HEADS, Dim("slots", 64, "slots of the state pool", divisor=1)),
        knobs=(Knob("block_v", (8, 16, 32, 64, 128), 32, "value columns a program updates"),),
        options=(
            _DTYPE,
            *_OPTIONS[name],
            *_COMMON,
            Option("state", (f32, bf16), f32, "dtype of the state"),
            Option("indexed", (True, False), True, "slots by state_indices"),
            Option("in_place", (True, False), True, "updates the pool instead of writing new states"),
        ),
        plan=partial(plans.token, f"{name}.decode"),
        launches=("token",),
        inputs=partial(judge.decode_inputs, name),
        call=partial(judge.decode_call, name),
        reference=judge.decode_reference,
        mutates=("state",),
        peers=lambda: {},
        limits=judge.decode_limits,
        constraints=lambda dims, knobs, _: head_constraints(dims) + _state(dims, knobs),
        traffic_bytes=judge.decode_traffic,
        heuristic=decode_rule,
        prepare_dims=decode_dims,
        cpu_dims={"B": 4, "H": 8},
    )


LINEAR_ATTENTION, DELTA_RULE, GATED_DELTA_RULE = map(_forward, _DOCS)
LINEAR_ATTENTION_DECODE, DELTA_RULE_DECODE, GATED_DELTA_RULE_DECODE = map(_decode, _DOCS)
FORWARD = {op.name: op for op in (LINEAR_ATTENTION, DELTA_RULE, GATED_DELTA_RULE)}
DECODE = dict(zip(_DOCS, (LINEAR_ATTENTION_DECODE, DELTA_RULE_DECODE, GATED_DELTA_RULE_DECODE), strict=True))
