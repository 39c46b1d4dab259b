"""What is wrong with an index whatever the data: the part of out-of-bounds that types and constants already show."""

from __future__ import annotations

from k3dsl.ir.graph import Index, Op, TensorParam
from k3dsl.ir.opset import access_shape
from k3dsl.ir.scalars import static_expr, uniform_constant
from k3dsl.ir.symbols import Expr

Problem = tuple[str, str | None]
KINDS = ("scalar", "full", "span", "tile")


def check_index(op: Op, tensor: TensorParam, runs: bool = True) -> Problem | None:
    """The first thing wrong with a memory op's index, with what to change; None when nothing is.

    runs: False where the op is known never to run, so that it may say what rows it likes. One with a mask may name rows that
    are not there: the mask says what is accessed, unless it is known to be true everywhere.
    """
    slot = op.attrs.get("mask_slot")
    masked = slot is not None and uniform_constant(op.operands[slot]) is not True
    for axis, index in enumerate(op.index):
        found = _form(op, index) or (_range(op, tensor, axis, index, masked) if runs else None)
        if found is not None:
            return f"axis {axis} of {tensor.name}: {found[0]}", found[1]
    order = op.attrs.get("order")
    if order is not None and sorted(order) != list(range(len(access_shape(op, tensor)))):
        return f"order={order} is no permutation of the tile's axes", None
    contiguity = op.attrs.get("contiguity")
    if contiguity is not None and (contiguity < 1 or contiguity & (contiguity - 1)):
        return f"contiguity={contiguity} must be a power of two", "a thread's neighbours of the last axis: 1, 2, 4 or 8"
    return None


def _form(op: Op, index: Index) -> Problem | None:
    if index.kind not in KINDS:
        return f"unknown kind of index {index.kind!r}", f"one of {', '.join(KINDS)}"
    if (index.kind == "full") != (index.start is None) or (index.kind != "span" and index.end is not None):
        return f"a {index.kind} index has the wrong operands", None
    if index.kind == "span" and (not index.shape or min(index.shape) < 1):
        return f"a span of shape {list(index.shape)} has no rows", None
    if index.kind in ("scalar", "tile") and index.start is not None:
        shape = op.operands[index.start].shape
        if index.shape != shape or (index.kind == "scalar") != (shape == ()):
            return f"a {index.kind} index of shape {list(index.shape)} holds {op.operands[index.start].type}", None
    return None


def _range(op: Op, tensor: TensorParam, axis: int, index: Index, masked: bool) -> Problem | None:
    if index.kind not in ("scalar", "span") or index.start is None:
        return None
    extent, start = tensor.shape[axis], static_expr(op.operands[index.start])
    end = None if index.end is None else static_expr(op.operands[index.end])
    if end is not None and (end - extent - 1).nonnegative():
        return f"end={end} is past the extent {extent}", None
    if masked:
        return None
    if start is not None and _negative(start):
        return f"index {start} is negative", "count from 0"
    if index.kind == "scalar":
        if start is not None and (start - extent).nonnegative():
            return f"index {start} is out of bounds, the extent is {extent}", None
        return None
    rows = 1
    for n in index.shape:
        rows *= n
    if index.end is None:
        last = rows if start is None else start + rows
        if (last - extent - 1 if isinstance(last, Expr) else Expr.of(last) - extent - 1).nonnegative():
            at = "" if start is None else f" from {start}"
            return f"a span of {rows} rows{at} overruns the extent {extent}", "give span(..., end=...)"
    return None


def _negative(expr: Expr) -> bool:
    return (-expr - 1).nonnegative()
