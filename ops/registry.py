"""The ops by name, as the command line and the tuner see them."""

from __future__ import annotations

import importlib

from k3dsl.runtime.op import Op, check_names

_WHERE = {
    "kda.forward": "k3dsl.ops.kda.space:FORWARD",
    "kda.decode": "k3dsl.ops.kda.space:DECODE",
    "matmul": "k3dsl.ops.matmul.space:MATMUL",
    "softmax": "k3dsl.ops.softmax.space:SOFTMAX",
    "rmsnorm": "k3dsl.ops.rmsnorm.space:RMSNORM",
    "attention": "k3dsl.ops.attention.space:ATTENTION",
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
