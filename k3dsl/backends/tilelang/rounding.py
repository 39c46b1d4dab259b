"""Rounds the operands of tf32 products, which matrix instructions would cut off instead."""

from __future__ import annotations

from k3dsl.backends.tilelang.uses import is_swap
from k3dsl.ir.graph import Kernel, Op, Region, Value
from k3dsl.ir.types import bf16, f16, f32


def round_operands(kernel: Kernel) -> Kernel:
    """Puts an op 'tf32' before every operand of a tf32 product. Rewrites the kernel in place and returns it."""
    _region(kernel.body, {})
    return kernel


def _region(region: Region, rounded: dict[int, Value]) -> None:
    out: list[Op] = []
    for op in region.ops:
        for inner in op.regions:
            _region(inner, dict(rounded))
        if op.opcode == "dot" and op.operands[0].dtype == f32 and op.attrs["precision"] == "tf32":
            op.operands[:2] = [_rounded(v, op.loc, out, rounded) for v in op.operands[:2]]
        out.append(op)
    region.ops = out


def _rounded(v: Value, loc: str | None, out: list[Op], rounded: dict[int, Value]) -> Value:
    """The value rounded, under the transposes that products see through."""
    known = rounded.get(id(v))
    if known is not None:
        return known
    source = v.op
    if source is not None and source.opcode == "cast" and source.operands[0].dtype in (bf16, f16):
        return v  # a tf32 number already
    if source is not None and is_swap(source):
        inner = _rounded(source.operands[0], loc, out, rounded)
        if inner is source.operands[0]:
            return v
        op = Op("permute", [inner], [v.type], dict(source.attrs), loc=loc)
    else:
        op = Op("tf32", [v], [v.type], loc=loc)
    op.result.name = v.name
    out.append(op)
    rounded[id(v)] = op.result
    return op.result
