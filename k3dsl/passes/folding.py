"""The rules of `simplify`, one op at a time: what an op can be replaced by, given its operands."""

from __future__ import annotations

from collections.abc import Callable

from k3dsl.ir.graph import Op, Value
from k3dsl.ir.scalars import (
    COMPARISONS,
    INTEGER_ARITHMETIC,
    combine,
    compared,
    integer_range,
    static_expr,
    uniform_constant,
    widens,
)
from k3dsl.ir.symbols import Expr
from k3dsl.ir.types import DType, TileType, i32, i64

Replacement = Value | Op | None


def fold(op: Op) -> Replacement:
    """A value that equals the op's only result, a simpler op to put in its place, or None."""
    if op.opcode in INTEGER_ARITHMETIC:
        return _fold_arithmetic(op)
    if op.opcode in COMPARISONS:
        return _fold_comparison(op)
    rule = _RULES.get(op.opcode)
    return rule(op) if rule else None


def _fold_arithmetic(op: Op) -> Replacement:
    a, b = op.operands
    if not a.dtype.is_int:
        return None
    x, y = static_expr(a), static_expr(b)
    if x is not None and y is not None:
        expr = combine(op.opcode, x, y)
        made = _static_op(expr, op) if expr is not None else None
        if made is not None:
            return made
    left, right = uniform_constant(a), uniform_constant(b)
    if (op.opcode in ("add", "sub") and right == 0) or (op.opcode in ("mul", "floordiv") and right == 1):
        return a
    if (op.opcode == "add" and left == 0) or (op.opcode == "mul" and left == 1):
        return b
    return a if op.opcode in ("min", "max") and a is b else None


def _static_op(expr: Expr, like: Op) -> Op | None:
    """A const or dim op for the expression, if it can have the type of `like`."""
    dtype = like.result.dtype
    if expr.constant is not None:
        low, high = integer_range(dtype)
        return _constant(expr.constant, dtype, like) if low <= expr.constant <= high else None
    upper = expr.upper()
    fits = i32 if upper is not None and upper < 2**31 else i64
    return _named(Op("dim", [], [TileType(dtype)], {"expr": expr}, loc=like.loc), like) if fits == dtype else None


def _constant(value: float | int | bool, dtype: DType, like: Op) -> Op:
    return _named(Op("const", [], [TileType(dtype)], {"value": value, "dtype": dtype}, loc=like.loc), like)


def _named(made: Op, like: Op) -> Op:
    made.result.name = like.result.name
    return made


def _replace(opcode: str, source: Value, type: TileType, attrs: dict[str, object], like: Op) -> Op:
    return _named(Op(opcode, [source], [type], attrs, loc=like.loc), like)


def _fold_comparison(op: Op) -> Replacement:
    x, y = static_expr(op.operands[0]), static_expr(op.operands[1])
    if x is None or y is None:
        return None
    known = compared(op.opcode, x, y)
    return None if known is None else _constant(known, op.result.dtype, op)


def _fold_cast(op: Op) -> Replacement:
    source, dtype = op.operands[0], op.result.dtype
    if source.dtype == dtype:
        return source
    inner = source.op
    if inner is not None and inner.opcode == "cast":
        origin = inner.operands[0]
        if origin.dtype == dtype and widens(origin.dtype, source.dtype):
            return origin
        if widens(origin.dtype, source.dtype) and origin.dtype.kind == dtype.kind:
            return _replace("cast", origin, op.result.type, {"dtype": dtype}, op)
    expr = static_expr(source)
    if expr is not None and expr.constant is not None and dtype.is_int:
        return _static_op(expr, op)
    return None


def _fold_reshape(op: Op) -> Replacement:
    source, shape = op.operands[0], op.result.shape
    if source.shape == shape:
        return source
    inner = source.op
    if inner is not None and inner.opcode == "reshape":
        origin = inner.operands[0]
        return origin if origin.shape == shape else _replace("reshape", origin, op.result.type, {"shape": shape}, op)
    if _spread_scalar(inner) and inner is not None:
        return _replace("broadcast", inner.operands[0], op.result.type, {"shape": shape}, op)
    return None


def _fold_permute(op: Op) -> Replacement:
    source, axes = op.operands[0], tuple(op.attrs["axes"])
    if axes == tuple(range(len(axes))):
        return source
    inner = source.op
    if inner is not None and inner.opcode == "permute":
        composed = tuple(inner.attrs["axes"][a] for a in axes)
        if composed == tuple(range(len(axes))):
            return inner.operands[0]
        return _replace("permute", inner.operands[0], op.result.type, {"axes": composed}, op)
    if _spread_scalar(inner) and inner is not None:
        return _replace("broadcast", inner.operands[0], op.result.type, {"shape": op.result.shape}, op)
    return None


def _fold_broadcast(op: Op) -> Replacement:
    source, shape = op.operands[0], op.result.shape
    if source.shape == shape:
        return source
    inner = source.op
    if inner is not None and inner.opcode == "broadcast":
        return _replace("broadcast", inner.operands[0], op.result.type, {"shape": shape}, op)
    if inner is not None and inner.opcode == "reshape" and inner.operands[0].shape == ():
        return _replace("broadcast", inner.operands[0], op.result.type, {"shape": shape}, op)
    return None


def _spread_scalar(op: Op | None) -> bool:
    return op is not None and op.opcode == "broadcast" and op.operands[0].shape == ()


def _fold_where(op: Op) -> Replacement:
    cond, a, b = op.operands
    if a is b:
        return a
    known = uniform_constant(cond)
    return None if known is None else a if known else b


def _fold_logic(op: Op) -> Replacement:
    """x & true and x | false are x; with the other constant they are that constant."""
    if not op.result.dtype.is_bool:
        return None
    neutral = op.opcode == "and"
    for constant, other in (op.operands, reversed(op.operands)):
        known = uniform_constant(constant)
        if known is not None:
            return other if bool(known) == neutral else constant
    return None


def _fold_neg(op: Op) -> Replacement:
    expr = static_expr(op.operands[0])
    return _static_op(-expr, op) if expr is not None else None


def _fold_not(op: Op) -> Replacement:
    known = uniform_constant(op.operands[0])
    if known is None or not op.result.dtype.is_bool or op.result.shape != ():
        return None
    return _constant(not known, op.result.dtype, op)


_RULES: dict[str, Callable[[Op], Replacement]] = {
    "cast": _fold_cast,
    "reshape": _fold_reshape,
    "permute": _fold_permute,
    "broadcast": _fold_broadcast,
    "where": _fold_where,
    "and": _fold_logic,
    "or": _fold_logic,
    "neg": _fold_neg,
    "not": _fold_not,
}
