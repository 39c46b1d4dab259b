"""Integer scalars of a kernel as polynomials over dims, program ids and loop indices, and what can be proved of them.

As everywhere in the language, integer arithmetic on indices is taken not to overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from k3dsl.ir.graph import Index, Kernel, Op, Value, walk
from k3dsl.ir.scalars import integer_range, widens
from k3dsl.ir.symbols import INT32_MAX, Atom, Expr, Opaque, Sym, cdiv, floordiv, larger, mod, smaller

_STEPS = 400  # of one proof; a proof that needs more gives up


@dataclass(frozen=True)
class _Limit:
    """The inclusive maximum of a symbol that stands for a program id or a loop's step count; its minimum is 0."""

    name: str
    last: Expr


class IndexAnalysis:
    """What one kernel's integer scalars are. Build it once for many questions; the kernel must not change meanwhile.

    Symbols that are not dims: '@pid<axis>'; '@i<k>', the number of steps that the k-th loop has taken; '@v<k>', a value of
    which nothing but its range is known.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._loops: dict[int, tuple[Op, int]] = {}
        for k, op in enumerate(o for o in walk(kernel.body) if o.opcode == "loop"):
            self._loops[id(op.regions[0].args[0])] = (op, k)
        self._limits: list[_Limit] = []
        self._known: dict[int, Expr] = {}
        self._keep: list[Value] = []
        self._tensors = {t.name: t for t in kernel.tensors}
        for axis, extent in enumerate(kernel.grid):
            self._limits.append(_Limit(f"@pid{axis}", extent - 1))

    def affine(self, value: Value) -> Expr:
        """The value as a polynomial. Unknown parts are symbols that may be negative."""
        found = self._known.get(id(value))
        if found is None:
            found = self._affine(value)
            self._known[id(value)] = found
            self._keep.append(value)
        return found

    def proved_divisor(self, value: Value) -> int:
        """A number that divides the value (0 for the constant 0)."""
        return self.affine(value).divisor()

    def span_in_bounds(self, op: Op, axis: int) -> bool:
        """True when no row of the op's span on that tensor axis can be below 0, or at or past its `end` (the tensor's
        extent when there is none)."""
        index = op.index[axis]
        if index.kind == "full":
            return True
        if index.start is None or op.operands[index.start].shape != ():
            return False
        start, rows = self.affine(op.operands[index.start]), _rows(index)
        extent = self._tensors[op.attrs["tensor"]].shape[axis]
        end = self.affine(op.operands[index.end]) if index.end is not None else extent
        return self.proves_nonnegative(start) and self.proves_nonnegative(end - start - rows)

    def proves_nonnegative(self, expr: Expr) -> bool:
        """True when expr is at least 0 in every program and every step of the loops, by the facts of the dims."""
        return _Proof(self._limits).nonnegative(expr)

    def _affine(self, value: Value) -> Expr:
        if id(value) in self._loops:
            return self._loop_index(*self._loops[id(value)])
        op = value.op
        if op is None or value.shape != () or not value.dtype.is_int:
            return self._unknown(value)
        if op.opcode == "const":
            return Expr.of(op.attrs["value"])
        if op.opcode == "dim":
            return op.attrs["expr"]
        if op.opcode == "program_id":
            axis = op.attrs["axis"]
            if axis >= len(self.kernel.grid):
                return Expr.of(0)
            return Expr.of(Sym(f"@pid{axis}", max=_maximum(self.kernel.grid[axis] - 1)))
        if op.opcode in ("add", "sub", "mul", "min", "max", "floordiv", "mod", "shl", "neg"):
            return self._arithmetic(op, value)
        if op.opcode == "cast" and not op.operands[0].dtype.is_float:
            return self._cast(op.operands[0], value)
        if op.opcode == "assume":
            return self._assume(op, value)
        if op.opcode == "where":
            return self._where(op, value)
        return self._unknown(value)

    def _arithmetic(self, op: Op, value: Value) -> Expr:
        a = self.affine(op.operands[0])
        if op.opcode == "neg":
            return -a
        b = self.affine(op.operands[1])
        if op.opcode == "add":
            return a + b
        if op.opcode == "sub":
            return a - b
        if op.opcode == "mul":
            return a * b
        if op.opcode == "min":
            return smaller(a, b)
        if op.opcode == "max":
            return larger(a, b)
        n = b.constant
        if op.opcode == "shl":
            return a * 2**n if n is not None and 0 <= n < 63 else self._unknown(value)
        # // and % are defined for operands of at least 0 only, and backends differ below that
        if self.proves_nonnegative(a) and (n > 0 if n is not None else self.proves_nonnegative(b - 1)):
            return floordiv(a, b) if op.opcode == "floordiv" else mod(a, b)
        return self._unknown(value)

    def _cast(self, source: Value, value: Value) -> Expr:
        low, high = integer_range(value.dtype)
        if source.dtype.is_bool:
            return Expr.of(Sym(f"@v{len(self._keep)}", max=1))
        a = self.affine(source)
        if widens(source.dtype, value.dtype):
            return a
        fits = self.proves_nonnegative(a - low) and self.proves_nonnegative(Expr.of(high) - a)
        return a if fits else self._unknown(value)

    def _assume(self, op: Op, value: Value) -> Expr:
        a = self.affine(op.operands[0])
        atoms = a.atoms()
        opaque = (
            len(atoms) == 1 and isinstance(atoms[0], Sym) and atoms[0].name.startswith("@v") and a == Expr.of(atoms[0])
        )
        if not opaque:
            return a
        atom = atoms[0]
        assert isinstance(atom, Sym)
        low, high = op.attrs.get("min"), op.attrs.get("max")
        return Expr.of(
            Sym(
                f"@v{len(self._keep)}",
                op.attrs.get("divisible_by") or 1,
                atom.min if low is None else max(low, atom.min),
                atom.max if high is None else min(high, atom.max),
            )
        )

    def _where(self, op: Op, value: Value) -> Expr:
        a, b = self.affine(op.operands[1]), self.affine(op.operands[2])
        if a == b:
            return a
        return self._unknown(value)

    def _loop_index(self, op: Op, k: int) -> Expr:
        """start + step * @i<k>, where @i<k> runs from 0 to the last step."""
        start, stop, step = self.affine(op.operands[0]), self.affine(op.operands[1]), op.attrs.get("step", 1)
        last = floordiv(stop - start - 1, step)
        name = f"@i{k}"
        self._limits.append(_Limit(name, last))
        return start + Expr.of(Sym(name, max=_maximum(last))) * step

    def _unknown(self, value: Value) -> Expr:
        low, high = integer_range(value.dtype)
        return Expr.of(Sym(f"@v{len(self._keep)}", min=low, max=high))


def affine(value: Value, kernel: Kernel) -> Expr:
    """An integer scalar of the kernel as a polynomial; see IndexAnalysis."""
    return IndexAnalysis(kernel).affine(value)


def span_in_bounds(op: Op, axis: int, kernel: Kernel) -> bool:
    """True when the op's span on a tensor axis provably needs no mask; see IndexAnalysis."""
    return IndexAnalysis(kernel).span_in_bounds(op, axis)


def proved_divisor(value: Value, kernel: Kernel) -> int:
    """A number that divides an integer scalar of the kernel; see IndexAnalysis."""
    return IndexAnalysis(kernel).proved_divisor(value)


class _Proof:
    """One proof that an expression is at least 0: eliminates one atom at a time, putting its least favourable end."""

    def __init__(self, limits: list[_Limit]) -> None:
        self.limits = limits
        self.steps = 0

    def nonnegative(self, expr: Expr) -> bool:
        self.steps += 1
        if self.steps > _STEPS:
            return False
        if expr.nonnegative():
            return True
        opaque = [a for a in expr.atoms() if isinstance(a, Opaque)]
        if opaque:
            return any(self._without(expr, atom) for atom in opaque)
        for limit in reversed(self.limits):
            if limit.name in expr.symbols():
                return self._at_ends(expr, limit.name, Expr.of(0), limit.last)
        for symbol in expr.symbols().values():
            if sum(symbol in monomial for monomial in expr.terms) > 1:
                return self._at_ends(expr, symbol.name, Expr.of(symbol.min), Expr.of(symbol.max))
        return False

    def _at_ends(self, expr: Expr, name: str, first: Expr, last: Expr) -> bool:
        """A linear expression is least at an end of the symbol's range: at the first if it grows, else at the last."""
        factor, rest = _split(expr, Expr.of(expr.symbols()[name]).atoms()[0])
        if factor is None:
            return False
        if self.nonnegative(factor):
            return self.nonnegative(rest + factor * first)
        if self.nonnegative(-factor):
            return self.nonnegative(rest + factor * last)
        return self.nonnegative(rest + factor * first) and self.nonnegative(rest + factor * last)

    def _without(self, expr: Expr, atom: Opaque) -> bool:
        """Replaces an opaque atom by a bound of it, chosen by the sign of its coefficient."""
        factor, rest = _split(expr, atom)
        if factor is None:
            return False
        if self.nonnegative(factor):
            return any(self.nonnegative(rest + factor * low) for low in self._bounds(atom, low=True))
        if self.nonnegative(-factor):
            return any(self.nonnegative(rest + factor * high) for high in self._bounds(atom, low=False))
        return False

    def _bounds(self, atom: Opaque, low: bool) -> list[Expr]:
        """Expressions that the atom is never below (low) or never above. Which one helps depends on the rest."""
        a, b = atom.a, atom.b
        n = b.constant
        if atom.op == "min":
            return [] if low else [a, b]
        if atom.op == "max":
            return [a, b] if low else []
        if atom.op in ("floordiv", "cdiv") and n is not None and n > 0:
            divide = floordiv if atom.op == "floordiv" else cdiv
            end = self._end(a, low)
            exact = Expr({m: c / n for m, c in a.terms.items()})
            slack = Expr({(): Fraction(n - 1, n)})
            loose = (
                exact - slack if low and divide is floordiv else exact + slack if not low and divide is cdiv else exact
            )
            return [loose] if end is None else [divide(end, n), loose]
        if atom.op == "mod" and self.nonnegative(b):
            return [Expr.of(0)] if low else [b - 1]
        return []

    def _end(self, expr: Expr, low: bool) -> Expr | None:
        """The least (low) or greatest value over all programs and steps, over dims alone; None if that is not known or the
        expression is over dims alone as it is."""
        changed = False
        for limit in reversed(self.limits):
            symbol = next((a for a in expr.atoms() if isinstance(a, Sym) and a.name == limit.name), None)
            if symbol is None:
                continue
            factor, rest = _split(expr, symbol)
            if factor is None:
                return None
            rising = self.nonnegative(factor)
            if not rising and not self.nonnegative(-factor):
                return None
            expr, changed = rest if rising == low else rest + factor * limit.last, True
        opaque = any(isinstance(a, Opaque) for a in expr.atoms())
        return expr if changed and not opaque else None


def _split(expr: Expr, atom: Atom) -> tuple[Expr | None, Expr]:
    """expr = factor * atom + rest; factor None when it is not linear in the atom."""
    factor: dict[tuple[Atom, ...], Fraction] = {}
    rest: dict[tuple[Atom, ...], Fraction] = {}
    key = atom.key()
    for monomial, c in expr.terms.items():
        others = tuple(a for a in monomial if a.key() != key)
        if len(others) == len(monomial):
            rest[monomial] = c
        elif len(others) == len(monomial) - 1:
            factor[others] = c
        else:
            return None, expr
    return Expr(factor), Expr(rest)


def _rows(index: Index) -> int:
    n = 1
    for extent in index.shape:
        n *= extent
    return n


def _maximum(last: Expr) -> int:
    high = last.upper()
    return INT32_MAX if high is None else max(0, min(high, INT32_MAX))
