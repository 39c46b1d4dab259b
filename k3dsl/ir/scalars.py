"""What is known at compile time of a value: a number, or an expression over dims."""

from __future__ import annotations

from collections.abc import Callable

from k3dsl.ir.graph import Op, Value
from k3dsl.ir.symbols import Expr, floordiv, larger, mod, smaller
from k3dsl.ir.types import DType

INTEGER_ARITHMETIC: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": floordiv,
    "mod": mod,
    "min": smaller,
    "max": larger,
}


def static_expr(value: Value) -> Expr | None:
    """The expression over dims that an integer scalar equals, or None when it depends on more than dims."""
    op = value.op
    if op is None or value.shape != () or not value.dtype.is_int:
        return None
    if op.opcode == "const":
        return Expr.of(op.attrs["value"])
    if op.opcode == "dim":
        return op.attrs["expr"]
    if op.opcode == "cast" and widens(op.operands[0].dtype, value.dtype):
        return static_expr(op.operands[0])
    if op.opcode in INTEGER_ARITHMETIC and len(op.operands) == 2:
        a, b = (static_expr(v) for v in op.operands)
        return None if a is None or b is None else combine(op.opcode, a, b)
    return None


def at_most(value: Value) -> Expr | None:
    """An expression over dims that an integer scalar does not exceed; None where none is seen."""
    known = static_expr(value)
    op = value.op
    if known is not None or op is None or value.shape != () or not value.dtype.is_int:
        return known
    if op.opcode == "cast" and widens(op.operands[0].dtype, value.dtype):
        return at_most(op.operands[0])
    if op.opcode == "min":
        bounds = [b for b in map(at_most, op.operands) if b is not None]
        return smaller(*bounds) if len(bounds) == 2 else bounds[0] if bounds else None
    if op.opcode == "max":
        left, right = map(at_most, op.operands)
        return None if left is None or right is None else larger(left, right)
    if op.opcode == "floordiv":
        whole, part = at_most(op.operands[0]), static_expr(op.operands[1])
        return None if whole is None or part is None else combine("floordiv", whole, part)
    return None


def never_runs(op: Op) -> bool:
    """True for a loop whose stop is known not to exceed its start, and for a `when` whose condition is known to be false,
    whatever the dims and the program."""
    if op.opcode == "loop":
        start, stop = static_expr(op.operands[0]), at_most(op.operands[1])
        return start is not None and stop is not None and (start - stop).nonnegative()
    return op.opcode == "when" and _false(op.operands[0])


def _false(condition: Value) -> bool:
    """True for a scalar that is known to be false."""
    op, known = condition.op, uniform_constant(condition)
    if op is None or op.opcode not in COMPARISONS:
        return known is not None and not known
    a, b = map(static_expr, op.operands)
    return a is not None and b is not None and compared(op.opcode, a, b) is False


# which difference being at least 0 proves the comparison, and which one refutes it
_PROOFS: dict[str, tuple[Callable[[Expr, Expr], Expr], Callable[[Expr, Expr], Expr]]] = {
    "lt": (lambda a, b: b - a - 1, lambda a, b: a - b),
    "le": (lambda a, b: b - a, lambda a, b: a - b - 1),
    "gt": (lambda a, b: a - b - 1, lambda a, b: b - a),
    "ge": (lambda a, b: a - b, lambda a, b: b - a - 1),
}
COMPARISONS = frozenset({*_PROOFS, "eq", "ne"})


def compared(opcode: str, a: Expr, b: Expr) -> bool | None:
    """What a comparison of two expressions gives whatever the dims; None where that depends on them."""
    if opcode in _PROOFS:
        proof, refutation = _PROOFS[opcode]
        return True if proof(a, b).nonnegative() else False if refutation(a, b).nonnegative() else None
    if a == b:
        return opcode == "eq"
    return opcode == "ne" if (a - b - 1).nonnegative() or (b - a - 1).nonnegative() else None


def combine(opcode: str, a: Expr, b: Expr) -> Expr | None:
    """An integer operation on expressions; None where the language leaves it open (// and % of negative numbers)."""
    if opcode in ("floordiv", "mod") and not (a.nonnegative() and (b - 1).nonnegative()):
        return None
    return INTEGER_ARITHMETIC[opcode](a, b)


def uniform_constant(value: Value) -> float | int | bool | None:
    """The number that every element of the value is known to be, seen through broadcast, reshape and permute."""
    op = value.op
    while op is not None and op.opcode in ("broadcast", "reshape", "permute"):
        op = op.operands[0].op
    return op.attrs["value"] if op is not None and op.opcode == "const" else None


def clamped(source: DType, target: DType) -> tuple[int, int] | None:
    """The range that a conversion from floats is clamped to on its way through i32, which saturates by itself; None where it
    needs no such way: fewer bits would wrap."""
    return integer_range(target) if source.is_float and target.is_int and target.bits < 32 else None


def wrapped(value: int, dtype: DType) -> int:
    """What an integer is in a dtype that may not hold it: its lowest bits."""
    low, high = integer_range(dtype)
    return (value - low) % (high - low + 1) + low


def integer_range(dtype: DType) -> tuple[int, int]:
    """The least and the greatest value of an integer or bool dtype."""
    if dtype.is_bool:
        return 0, 1
    if dtype.kind == "uint":
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


def widens(a: DType, b: DType) -> bool:
    """True when each value of `a` is exactly a value of `b`, of the same kind."""
    if a == b:
        return True
    if a.is_float and b.is_float:
        return b.bits > a.bits
    if a.is_int and b.is_int:
        return b.bits > a.bits and not (a.kind == "int" and b.kind == "uint")
    return False
