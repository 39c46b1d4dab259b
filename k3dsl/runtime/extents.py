"""Sizes known only at run time: quick functions of the dims, and the dims read back off the shapes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from k3dsl.ir.symbols import Expr, Sym


def expression(exprs: tuple[Expr, ...]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """A fast function of the dims for a tuple of expressions."""

    def call(op: str, a: str, b: str) -> str:
        if op == "cdiv":
            return f"-(-({a}) // ({b}))"
        return f"(({a}) {'//' if op == 'floordiv' else '%'} ({b}))" if op in ("floordiv", "mod") else f"{op}({a}, {b})"

    parts = [e.render(lambda n: f"d[{n!r}]", call) for e in exprs]
    text = f"lambda d: ({', '.join(parts)}{',' if parts else ''})"
    return eval(text, {"min": min, "max": max})  # the text comes from Expr.render alone


def solve(expr: Expr, value: int) -> tuple[str, int] | None:
    """(symbol, its value) where the expression is a * symbol + b and equals `value`; None for any other expression.

    Where no integer fits, the value is rounded down: comparing the shape afterwards tells.
    """
    slope, offset, symbol = 0, 0, None
    for monomial, coefficient in expr.terms.items():
        if coefficient.denominator != 1:
            return None
        if monomial == ():
            offset = int(coefficient)
        elif len(monomial) == 1 and isinstance(monomial[0], Sym) and symbol is None:
            symbol, slope = monomial[0].name, int(coefficient)
        else:
            return None
    return None if symbol is None else (symbol, (value - offset) // slope)


def where_dims_are(tensors: Iterable[Any]) -> dict[str, tuple[str, int, bool, Expr]]:
    """For each runtime dim that some tensor tells: (tensor, axis, whether as a stride, the expression to solve).

    tensors: anything with name, shape and strides (None when contiguous) as expressions. A dim that stands alone in a
    shape is taken from there first.
    """
    found: dict[str, tuple[str, int, bool, Expr]] = {}
    for plain in (True, False):
        for t in tensors:
            for exprs, stride in ((t.shape, False), (t.strides or (), True)):
                for axis, e in enumerate(exprs):
                    solved = solve(e, 0)
                    if solved is not None and (not plain or e == Expr.of(next(iter(e.symbols().values())))):
                        found.setdefault(solved[0], (t.name, axis, stride, e))
    return found
