"""A sound range for every value of a kernel: the least and the greatest number that any of its elements can be.

Ranges are of the numbers in the mathematics; the rounding of a cast is allowed for, NaN and infinite inputs are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from k3dsl.ir.graph import Kernel, Op, Region, Value
from k3dsl.ir.scalars import integer_range
from k3dsl.ir.types import DType

INF = math.inf
_ROUNDS = 3  # of a loop's body before a carry that still grows is taken to be unbounded
_ROUNDING = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "f8e4m3": 2.0**-3, "f8e5m2": 2.0**-2}


@dataclass(frozen=True)
class Range:
    """low <= x <= high."""

    low: float = -INF
    high: float = INF

    def join(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __mul__(self, other: Range) -> Range:
        corners = [_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Range(min(corners), max(corners))

    def sum_of(self, least: int, most: int) -> Range:
        """The range of a sum of `least` to `most` such numbers."""
        return Range(self.low * (most if self.low < 0 else least), self.high * (most if self.high > 0 else least))

    def within(self, low: float, high: float) -> Range:
        return Range(min(max(self.low, low), high), max(min(self.high, high), low))


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b  # a bound of infinity is no number: 0 times it is 0


def ranges(kernel: Kernel) -> dict[int, Range]:
    """The range of each value, by id(value)."""
    known: dict[int, Range] = {id(v): of_dtype(v.dtype) for v in kernel.scalar_values}
    _region(kernel.body, known)
    return known


def of_dtype(dtype: DType) -> Range:
    """All that a value of the dtype can be."""
    if dtype.is_float:
        return Range()
    low, high = integer_range(dtype)
    return Range(low, high)


def _region(region: Region, known: dict[int, Range]) -> None:
    for op in region.ops:
        if op.opcode == "loop":
            _loop(op, known)
            continue
        for inner in op.regions:
            for arg in inner.args:
                known[id(arg)] = of_dtype(arg.dtype)
            _region(inner, known)
        for value in op.results:
            known[id(value)] = _result(op, value, known)


def _loop(op: Op, known: dict[int, Range]) -> None:
    """Carries: what goes in joined with what comes out, repeated; a bound that keeps moving is given up."""
    region = op.regions[0]
    start, stop = known[id(op.operands[0])], known[id(op.operands[1])]
    known[id(region.args[0])] = Range(start.low, max(start.low, stop.high - 1))
    carries = [known[id(v)] for v in op.operands[2:]]
    for attempt in range(_ROUNDS + 2):
        for arg, r in zip(region.args[1:], carries, strict=True):
            known[id(arg)] = r
        _region(region, known)
        joined = [c.join(known[id(v)]) for c, v in zip(carries, region.yields, strict=True)]
        if joined == carries:
            break
        if attempt >= _ROUNDS:
            joined = [Range()] * len(joined)
        elif attempt == _ROUNDS - 1:
            joined = [
                Range(c.low if c.low == j.low else -INF, c.high if c.high == j.high else INF)
                for c, j in zip(carries, joined, strict=True)
            ]
        carries = joined
    for value, r in zip(op.results, carries, strict=True):
        known[id(value)] = r


def _result(op: Op, value: Value, known: dict[int, Range]) -> Range:
    rule = _RULES.get(op.opcode)
    if rule is None or value.dtype.bits == 1:
        return of_dtype(value.dtype)
    found = rule(op, [known[id(v)] for v in op.operands])
    if math.isnan(found.low) or math.isnan(found.high):
        return of_dtype(value.dtype)
    if value.dtype.is_float:
        return found
    whole = of_dtype(value.dtype)  # integers wrap: a range that does not fit says nothing
    return found if whole.low <= found.low and found.high <= whole.high else whole


def _monotone(f: Callable[[float], float], low: float, high: float) -> Callable[[Op, list[Range]], Range]:
    def rule(op: Op, xs: list[Range]) -> Range:
        return Range(_at(f, xs[0].low, low), _at(f, xs[0].high, high)).within(low, high)

    return rule


def _at(f: Callable[[float], float], x: float, otherwise: float) -> float:
    """f(x), or `otherwise` where it has no value."""
    try:
        y = f(x)
    except (OverflowError, ValueError):
        return otherwise
    return otherwise if math.isnan(y) else y


def _constant(op: Op, xs: list[Range]) -> Range:
    return Range(float(op.attrs["value"]), float(op.attrs["value"]))


def _dim(op: Op, xs: list[Range]) -> Range:
    low, high = op.attrs["expr"].bounds()
    return Range(-INF if low is None else float(low), INF if high is None else float(high))


def _cast(op: Op, xs: list[Range]) -> Range:
    dtype, x = op.result.dtype, xs[0]
    if dtype.is_int:
        return x.within(*integer_range(dtype)) if op.operands[0].dtype.is_float else x
    return Range(-rounded_up(-x.low, dtype), rounded_up(x.high, dtype))


def rounded_up(x: float, dtype: DType) -> float:
    """The most that a number of at most x can be after a cast. Rounding is monotone and keeps 0, so a sign is never lost."""
    return x if math.isinf(x) else x + abs(x) * _ROUNDING.get(dtype.name, 0.0)


def _mul(op: Op, xs: list[Range]) -> Range:
    product = xs[0] * xs[1]
    return Range(max(0.0, product.low), product.high) if op.operands[0] is op.operands[1] else product


def _inverse_of(x: Range) -> Range:
    """The range of 1 / x; a 0 at an end of x counts as the limit from inside."""
    if x.low >= 0:
        return Range(0.0 if x.high == INF else 1 / x.high if x.high > 0 else INF, INF if x.low == 0 else 1 / x.low)
    if x.high <= 0:
        return -_inverse_of(-x)
    return Range()


def _reduce(op: Op, xs: list[Range]) -> Range:
    n, x, kind = op.operands[0].shape[op.attrs["axis"]], xs[0], op.attrs.get("kind")
    if kind == "sum":
        return x.sum_of(n, n)
    if kind in ("max", "min"):
        return x
    if kind == "prod" and x.low >= 0:
        return Range(x.low**n if x.low <= 1 else x.low, 1.0 if x.high <= 1 else INF)
    return Range()


def _scan(op: Op, xs: list[Range]) -> Range:
    n, x, kind = op.operands[0].shape[op.attrs["axis"]], xs[0], op.attrs.get("kind")
    if kind == "sum":
        return x.sum_of(1, n)
    if kind in ("max", "min"):
        return x
    return Range(0.0, 1.0 if x.high <= 1 else INF) if kind == "prod" and x.low >= 0 else Range()


def _dot(op: Op, xs: list[Range]) -> Range:
    products = (xs[0] * xs[1]).sum_of(*[op.operands[0].shape[-1]] * 2)
    return products + xs[2] if len(xs) == 3 else products


def _assume(op: Op, xs: list[Range]) -> Range:
    low, high = op.attrs.get("min"), op.attrs.get("max")
    return xs[0].within(-INF if low is None else low, INF if high is None else high)


def _floordiv(op: Op, xs: list[Range]) -> Range:
    return Range(0.0, xs[0].high) if xs[0].low >= 0 and xs[1].low >= 0 else of_dtype(op.result.dtype)


def _mod(op: Op, xs: list[Range]) -> Range:
    return (
        Range(0.0, min(xs[0].high, xs[1].high - 1)) if xs[0].low >= 0 and xs[1].low >= 1 else of_dtype(op.result.dtype)
    )


def _same(op: Op, xs: list[Range]) -> Range:
    return xs[0]


def _positions(op: Op, xs: list[Range]) -> Range:
    return Range(0.0, op.operands[0].shape[op.attrs["axis"]] - 1.0)


def _abs(op: Op, xs: list[Range]) -> Range:
    x = xs[0]
    return Range(max(0.0, x.low, -x.high), max(-x.low, x.high))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 0.5 * (1 + math.tanh(x / 2))


_RULES: dict[str, Callable[[Op, list[Range]], Range]] = {
    "const": _constant,
    "dim": _dim,
    "program_id": lambda op, xs: Range(0.0, 2.0**31 - 1),
    "iota": lambda op, xs: Range(0.0, op.attrs["size"] - 1.0),
    "cast": _cast,
    "assume": _assume,
    "add": lambda op, xs: xs[0] + xs[1],
    "sub": lambda op, xs: xs[0] + -xs[1],
    "mul": _mul,
    "div": lambda op, xs: xs[0] * _inverse_of(xs[1]),
    "floordiv": _floordiv,
    "mod": _mod,
    "min": lambda op, xs: Range(min(xs[0].low, xs[1].low), min(xs[0].high, xs[1].high)),
    "max": lambda op, xs: Range(max(xs[0].low, xs[1].low), max(xs[0].high, xs[1].high)),
    "neg": lambda op, xs: -xs[0],
    "abs": _abs,
    "where": lambda op, xs: xs[1].join(xs[2]),
    "reduce": _reduce,
    "scan": _scan,
    "dot": _dot,
    "argmax": _positions,
    "argmin": _positions,
    "exp": _monotone(math.exp, 0.0, INF),
    "exp2": _monotone(lambda x: 2.0**x, 0.0, INF),
    "log": _monotone(math.log, -INF, INF),
    "log2": _monotone(math.log2, -INF, INF),
    "log1p": _monotone(math.log1p, -INF, INF),
    "sqrt": _monotone(math.sqrt, 0.0, INF),
    "rsqrt": lambda op, xs: Range(0.0, INF),
    "tanh": _monotone(math.tanh, -1.0, 1.0),
    "sigmoid": _monotone(_sigmoid, 0.0, 1.0),
    "softplus": _monotone(_softplus, 0.0, INF),
    "reciprocal": lambda op, xs: _inverse_of(xs[0]),
    "sin": lambda op, xs: Range(-1.0, 1.0),
    "cos": lambda op, xs: Range(-1.0, 1.0),
    "erf": _monotone(math.erf, -1.0, 1.0),
    "floor": lambda op, xs: Range(xs[0].low - 1, xs[0].high),
    "ceil": lambda op, xs: Range(xs[0].low, xs[0].high + 1),
    "reshape": _same,
    "broadcast": _same,
    "permute": _same,
    "select": _same,
}
