"""The ops by name, as the command line and the tuner see them."""

from __future__ import annotations

import importlib

from k3dsl.runtime.op import Op, check_names

_WHERE = {
    "kda.forward": "k3dsl.ops.kda.space:FORWARD",
    "kda.decode": "k3dsl.ops.kda.space:DECODE",
    "kda.step": "k3dsl.ops.kda_step.space:STEP",
    "kda.commit": "k3dsl.ops.kda_step.space:COMMIT",
    "causal_conv1d": "k3dsl.ops.causal_conv1d.space:CAUSAL_CONV1D",
    "causal_conv1d.update": "k3dsl.ops.causal_conv1d.space:CAUSAL_CONV1D_UPDATE",
    "gated_rmsnorm": "k3dsl.ops.gated_rmsnorm.space:GATED_RMSNORM",
    "gated_delta_rule": "k3dsl.ops.linear_attention.space:GATED_DELTA_RULE",
    "gated_delta_rule.decode": "k3dsl.ops.linear_attention.space:GATED_DELTA_RULE_DECODE",
    "delta_rule": "k3dsl.ops.linear_attention.space:DELTA_RULE",
    "delta_rule.decode": "k3dsl.ops.linear_attention.space:DELTA_RULE_DECODE",
    "linear_attention": "k3dsl.ops.linear_attention.space:LINEAR_ATTENTION",
    "linear_attention.decode": "k3dsl.ops.linear_attention.space:LINEAR_ATTENTION_DECODE",
    "attnres.site": "k3dsl.ops.attnres.space:SITE",
    "attnres.phase1": "k3dsl.ops.attnres.space:PHASE1",
    "attnres.merge": "k3dsl.ops.attnres.space:MERGE",
    "mla.prefill": "k3dsl.ops.mla.space:PREFILL",
    "mla.decode": "k3dsl.ops.mla.space:DECODE",
    "mla.cache_write": "k3dsl.ops.mla.space:CACHE_WRITE",
    "moe.router": "k3dsl.ops.moe.space:ROUTER",
    "moe.topk": "k3dsl.ops.moe.space:TOPK",
    "moe.sort": "k3dsl.ops.moe.space:SORT",
    "moe.experts": "k3dsl.ops.moe.space:EXPERTS",
    "moe.situ": "k3dsl.ops.moe.space:SITU",
    "matmul": "k3dsl.ops.matmul.space:MATMUL",
    "softmax": "k3dsl.ops.softmax.space:SOFTMAX",
    "rmsnorm": "k3dsl.ops.rmsnorm.space:RMSNORM",
    "attention": "k3dsl.ops.attention.space:ATTENTION",
    "attention.decode": "k3dsl.ops.attention.decode_space:ATTENTION_DECODE",
    "segment_sum": "k3dsl.ops.segment_sum.space:SEGMENT_SUM",
}


def op_names() -> list[str]:
    """All names, in the order they are listed."""
    return list(_WHERE)


def get_op(name: str) -> Op:
    """The op of that name. Raises UnknownNameError with near misses."""
    check_names("op", [name], op_names())
    module, attribute = _WHERE[name].split(":")
    return getattr(importlib.import_module(module), attribute)
