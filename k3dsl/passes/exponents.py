"""Finds exps that can overflow: each must have an argument that is provably small, or state its bound.

An argument passes when its range is bounded (`intervals`), when it is a difference that is at most 0 by construction
(x - max(x)), or when it is a cumulative sum less the same sum at a fixed row, whose span is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from k3dsl.backends.base import Reason
from k3dsl.ir.graph import Kernel, Op, Value, walk
from k3dsl.ir.types import TileType
from k3dsl.passes.intervals import INF, Range, ranges, rounded_up

CODE = "unbounded_exponent"
_DEPTH = 24
_Use = Callable[[Op, Value], bool]
_VIEWS = ("reshape", "broadcast", "permute")
# the largest argument of e**x whose result is finite, nats, rounded down
_NATS = {"f64": 709.0, "f32": 88.0, "bf16": 88.0, "f16": 11.0, "f8e4m3": 6.0, "f8e5m2": 10.0}
_LOG2 = {"f64": 1023.0, "f32": 127.0, "bf16": 127.0, "f16": 15.0, "f8e4m3": 8.0, "f8e5m2": 15.0}


def check_exponents(kernel: Kernel) -> list[Reason]:
    """A reason for each exp and exp2 whose argument is not provably below its dtype's overflow: 88 nats (127 in log2) for
    f32. `exp2(x, bound=...)` states a bound that the analysis cannot see."""
    lint = ExponentLint(kernel)
    return [r for op in walk(kernel.body) if op.opcode in ("exp", "exp2") for r in lint.check(op)]


class ExponentLint:
    """The lint of one kernel; the kernel must not change meanwhile."""

    def __init__(self, kernel: Kernel) -> None:
        self.known = ranges(kernel)
        self.users: dict[int, list[Op]] = {}
        for op in walk(kernel.body):
            for v in op.operands:
                self.users.setdefault(id(v), []).append(op)
            for region in op.regions:
                for v in region.yields:
                    self.users.setdefault(id(v), []).append(op)

    def check(self, op: Op) -> list[Reason]:
        """The reason, if there is one, why an exp or exp2 may overflow."""
        table, unit = (_NATS, "nats") if op.opcode == "exp" else (_LOG2, "in log2")
        limit = table[op.result.dtype.name]
        stated = op.attrs.get("bound")
        if stated is not None:
            if stated <= limit:
                return []
            message = f"{op.opcode} states bound={stated:g}, but overflows {op.result.dtype} above {limit:g} {unit}"
            return [Reason(CODE, message, op.loc)]
        high = self.upper(op.operands[0])
        if high <= limit or self._saturates(op.result):
            return []
        found = "has no upper bound" if high == INF else f"can reach {high:g}"
        message = (
            f"the argument of {op.opcode} {found}; {op.result.dtype} overflows above {limit:g} {unit}. Write it so that it is "
            f"at most 0 (minimum(x, 0), or subtract the maximum), or state what is known: {op.opcode}(x, bound={limit:g})"
        )
        return [Reason(CODE, message, op.loc)]

    def upper(self, value: Value) -> float:
        """An upper bound of the value, from its range and from what differences are known."""
        return self._upper(value, _DEPTH)

    def _upper(self, value: Value, depth: int) -> float:
        best = self.known[id(value)].high
        op = value.op
        if op is None or depth == 0:
            return best
        if op.opcode in _VIEWS or op.opcode == "select":
            return min(best, self._upper(op.operands[0], depth - 1))
        if op.opcode == "cast" and op.operands[0].dtype.is_float:
            inner = self._upper(op.operands[0], depth - 1)
            return min(best, rounded_up(inner, op.result.dtype))
        if op.opcode == "sub":
            a, b = op.operands
            if self._at_most(a, b, depth):
                best = min(best, 0.0)
            span = _cumulative_span(a, b, self.known)
            return best if span is None else min(best, span)
        if op.opcode == "mul":
            for x, y in (op.operands, op.operands[::-1]):
                r = self.known[id(y)]
                if r.low >= 0:
                    high = self._upper(x, depth - 1)
                    best = min(best, 0.0 if high <= 0 else high * r.high if r.high < INF else INF)
        if op.opcode == "where":
            return min(best, max(self._upper(v, depth - 1) for v in op.operands[1:]))
        if op.opcode == "min":
            return min(best, *(self._upper(v, depth - 1) for v in op.operands))
        if op.opcode == "max":
            return min(best, max(self._upper(v, depth - 1) for v in op.operands))
        if op.opcode == "add":
            return min(best, sum(self._upper(v, depth - 1) for v in op.operands))
        return best

    def _at_most(self, a: Value, b: Value, depth: int) -> bool:
        """True when a <= b in every element, by how b is made: a maximum over a, or of a and something."""
        return self._below(a, b, (), depth)

    def _below(self, a: Value, core: Value, views: tuple[Op, ...], depth: int) -> bool:
        """a <= core seen through `views` (outermost last)."""
        if depth == 0:
            return False
        if not views and a is core:
            return True
        if not views and a.op is not None and a.op.opcode == "min" and a.shape == core.shape:
            return any(self._below(x, core, views, depth - 1) for x in a.op.operands)
        if (
            views
            and _same_view(a, views[-1])
            and a.op is not None
            and self._below(a.op.operands[0], core, views[:-1], depth - 1)
        ):
            return True
        op = core.op
        if op is None:
            return False
        if op.opcode in _VIEWS:
            return self._below(a, op.operands[0], (op, *views), depth - 1)
        if op.opcode == "max":
            return any(self._below(a, x, views, depth - 1) for x in op.operands)
        if op.opcode == "scan" and op.attrs.get("kind") == "max" and not views:
            return self._below(a, op.operands[0], (), depth - 1)
        if op.opcode == "reduce" and op.attrs.get("kind") == "max" and _restores_axis(op, views):
            return self._below(a, op.operands[0], (), depth - 1)
        return False

    def _saturates(self, value: Value) -> bool:
        """True when the value is only used as 1 / (value + c), c >= 0, which is 0 where the value is infinite."""
        return self._only_used(value, self._added_then_inverted)

    def _added_then_inverted(self, user: Op, value: Value) -> bool:
        if user.opcode in _VIEWS:
            return self._only_used(user.result, self._added_then_inverted)
        if user.opcode != "add":
            return _inverts(user, value)
        other = user.operands[1] if user.operands[0] is value else user.operands[0]
        return self.known[id(other)].low >= 0 and self._only_used(user.result, _inverts)

    def _only_used(self, value: Value, allowed: _Use) -> bool:
        users = self.users.get(id(value), [])
        return bool(users) and all(allowed(u, value) for u in users)


def _inverts(user: Op, value: Value) -> bool:
    return user.opcode == "reciprocal" or (user.opcode == "div" and user.operands[0] is not value)


def _same_view(a: Value, view: Op) -> bool:
    op = a.op
    return (
        op is not None
        and op.opcode == view.opcode
        and op.attrs == view.attrs
        and op.operands[0].shape == view.operands[0].shape
    )


def _restores_axis(reduce: Op, views: tuple[Op, ...]) -> bool:
    """True when the views repeat each maximum along the axis it was taken over."""
    source: TileType = reduce.operands[0].type
    axis = reduce.attrs["axis"]
    kept = (*source.shape[:axis], 1, *source.shape[axis + 1 :])
    if source.shape[axis] == 1 and not views and reduce.result.shape == source.shape:
        return True
    if not views or views[-1].opcode != "broadcast" or views[-1].result.shape != source.shape:
        return False
    if views[-1].operands[0].shape != kept:
        # a scalar maximum of a 1-D tile broadcasts without a reshape
        return len(views) == 1 and source.rank == 1
    return all(v.opcode == "reshape" for v in views[:-1])


def _cumulative_span(a: Value, b: Value, known: dict[int, Range]) -> float | None:
    """The largest a - b when one is a cumulative sum and the other the same sum at a fixed row; None when they are not."""
    for moving, fixed, sign in ((a, b, 1), (b, a, -1)):
        scan = moving.op
        if scan is None or scan.opcode != "scan" or scan.attrs.get("kind") != "sum":
            continue
        at = _fixed_row(scan, fixed)
        if at is None:
            continue
        x, n, reverse = known[id(scan.operands[0])], moving.shape[scan.attrs["axis"]], bool(scan.attrs.get("reverse"))
        # terms that the moving sum has and the fixed one lacks, and the other way round
        more, less = (at, n - 1 - at) if reverse else (n - 1 - at, at)
        if sign < 0:
            more, less = less, more
        return max(0.0, _scaled(more, x.high), _scaled(less, -x.low))
    return None


def _fixed_row(scan: Op, fixed: Value) -> int | None:
    """The position along the scan's axis of which `fixed` is the running sum, repeated along that axis."""
    total: TileType = scan.result.type
    axis, op, chain = scan.attrs["axis"], fixed.op, []
    while op is not None and op.opcode in ("reshape", "broadcast"):
        chain.append(op)
        op = op.operands[0].op
    if op is None or not chain or chain[0].opcode != "broadcast" or any(v.opcode == "broadcast" for v in chain[1:]):
        return None
    kept = (*total.shape[:axis], 1, *total.shape[axis + 1 :])
    if chain[0].operands[0].shape != kept and total.rank != 1:
        return None
    if op.opcode == "select" and op.operands[0] is scan.result and op.attrs["axis"] == axis:
        return op.attrs["position"]
    whole = op.opcode == "reduce" and op.attrs.get("kind") == "sum" and op.attrs["axis"] == axis
    if whole and op.operands[0] is scan.operands[0]:
        return 0 if scan.attrs.get("reverse") else total.shape[axis] - 1
    return None


def _scaled(n: int, x: float) -> float:
    return 0.0 if n == 0 else n * x if not math.isinf(x) else x
