"""Integer expressions over runtime dims: grids, tensor shapes, strides, and the proofs that drop a mask.

An `Expr` is a polynomial over atoms. An atom is a symbol with facts, or an opaque quotient, remainder, min or max.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Union

from k3dsl.errors import ParseError, TraceError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Sym:
    """A runtime integer with facts that every launch must satisfy: minimum, maximum, a known divisor."""

    name: str
    divisible_by: int = 1
    min: int = 0
    max: int = INT32_MAX

    def key(self) -> tuple[str, ...]:
        return ("sym", self.name)

    def bounds(self) -> Interval:
        """The least and the greatest value."""
        return Fraction(self.min), Fraction(self.max)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Opaque:
    """An operation on expressions that is no polynomial: 'floordiv', 'cdiv', 'mod', 'min' or 'max'."""

    op: str
    a: Expr
    b: Expr

    def key(self) -> tuple[str, ...]:
        return ("op", self.op, str(self.a), str(self.b))

    def bounds(self) -> Interval:
        """The least and the greatest value that the facts allow; None where there is no bound."""
        (a_low, a_high), (b_low, b_high) = self.a.bounds(), self.b.bounds()
        if self.op in ("min", "max"):
            return _min_bounds(self) if self.op == "min" else _max_bounds(self)
        if b_low is None or b_low < 0:
            return None, None
        b_low = max(b_low, Fraction(1))  # division by 0 gives no value
        if self.op == "mod":
            high = None if b_high is None else b_high - 1
            if a_low is not None and a_low >= 0 and a_high is not None:
                high = a_high if high is None else min(high, a_high)
            return Fraction(0), high
        return _quotient((a_low, a_high), b_low, b_high, up=self.op == "cdiv")

    def __str__(self) -> str:
        return f"{self.op}({self.a}, {self.b})"


Atom = Sym | Opaque
Monomial = tuple[Atom, ...]
IntLike = Union[int, "Expr"]
Interval = tuple[Fraction | None, Fraction | None]


_unequal: Callable[[Expr, Expr], None] | None = None


def when_unequal(ask: Callable[[Expr, Expr], None]) -> None:
    """Sets who is asked before two different expressions are called unequal; it may raise."""
    global _unequal
    _unequal = ask


class Expr:
    """An immutable integer expression. Supports +, -, *, // and %, with integers and other expressions."""

    __slots__ = ("terms",)
    terms: dict[Monomial, Fraction]

    def __init__(self, terms: Mapping[Monomial, Fraction]) -> None:
        self.terms = {m: c for m, c in terms.items() if c != 0}

    @staticmethod
    def of(value: IntLike | Sym | Opaque) -> Expr:
        if isinstance(value, Expr):
            return value
        if isinstance(value, (Sym, Opaque)):
            return Expr({(value,): Fraction(1)})
        return Expr({(): Fraction(int(value))})

    @property
    def constant(self) -> int | None:
        """The value if it is a plain integer, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and () in self.terms and self.terms[()].denominator == 1:
            return int(self.terms[()])
        return None

    def atoms(self) -> list[Atom]:
        found: dict[tuple[str, ...], Atom] = {}
        for monomial in self.terms:
            for atom in monomial:
                found[atom.key()] = atom
        return list(found.values())

    def symbols(self) -> dict[str, Sym]:
        """Every symbol in the expression, also inside opaque parts."""
        found: dict[str, Sym] = {}
        for atom in self.atoms():
            if isinstance(atom, Sym):
                found[atom.name] = atom
            else:
                found.update(atom.a.symbols())
                found.update(atom.b.symbols())
        return found

    def __add__(self, other: object) -> Expr:
        if not isinstance(other, (int, Expr)) or isinstance(other, bool):
            return NotImplemented
        terms = dict(self.terms)
        for m, c in Expr.of(other).terms.items():
            terms[m] = terms.get(m, Fraction(0)) + c
        return Expr(terms)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: object) -> Expr:
        if not isinstance(other, (int, Expr)) or isinstance(other, bool):
            return NotImplemented
        return self + (-Expr.of(other))

    def __rsub__(self, other: object) -> Expr:
        return (-self) + other

    def __mul__(self, other: object) -> Expr:
        if not isinstance(other, (int, Expr)) or isinstance(other, bool):
            return NotImplemented
        terms: dict[Monomial, Fraction] = {}
        for m1, c1 in self.terms.items():
            for m2, c2 in Expr.of(other).terms.items():
                m = tuple(sorted(m1 + m2, key=lambda a: a.key()))
                terms[m] = terms.get(m, Fraction(0)) + c1 * c2
        return Expr(terms)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Expr:
        if not isinstance(other, (int, Expr)):
            return NotImplemented
        return floordiv(self, other)

    def __mod__(self, other: object) -> Expr:
        if not isinstance(other, (int, Expr)):
            return NotImplemented
        return mod(self, other)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same expression. Who asks in a kernel may mean the numbers: see `when_unequal`."""
        if isinstance(other, int):
            other = Expr.of(other)
        if not isinstance(other, Expr):
            return False
        if str(self) == str(other):
            return True
        if _unequal is not None:
            _unequal(self, other)
        return False

    def __hash__(self) -> int:
        return hash(str(self))

    def _compared(self, other: object, difference: Callable[[Expr], Expr]) -> bool:
        """Whether an inequality holds by the facts; TraceError when they do not decide it."""
        if not isinstance(other, (int, Expr)):
            return NotImplemented
        holds = difference(Expr.of(other))
        if holds.nonnegative():
            return True
        if (-1 - holds).nonnegative():
            return False
        raise TraceError(
            f"{self} compared with {other} is only known at run time",
            fix="make the dim static, or compare traced values: scalar(d.T) > n, in where() or when()",
        )

    def __ge__(self, other: object) -> bool:
        return self._compared(other, lambda o: self - o)

    def __gt__(self, other: object) -> bool:
        return self._compared(other, lambda o: self - o - 1)

    def __le__(self, other: object) -> bool:
        return self._compared(other, lambda o: o - self)

    def __lt__(self, other: object) -> bool:
        return self._compared(other, lambda o: o - self - 1)

    def __bool__(self) -> bool:
        c = self.constant
        if c is None:
            raise TraceError(
                f"the runtime dim expression {self} was used where Python needs a plain number",
                fix="make the dim static (pass an int), or use where()/when() on a traced comparison",
            )
        return c != 0

    def __truediv__(self, other: object) -> Expr:
        return _no_quotient(self, other, other)

    def __rtruediv__(self, other: object) -> Expr:
        return _no_quotient(other, self, other)

    def __int__(self) -> int:
        c = self.constant
        if c is None:
            raise TraceError(
                f"{self} is only known at run time",
                fix="make the dim static (pass an int); @loop(d.T) loops at run time",
            )
        return c

    __index__ = __int__

    def divisor(self) -> int:
        """A number that divides the value, from the facts of its symbols (0 for the constant 0)."""
        g = 0
        for monomial, coefficient in self.terms.items():
            n = coefficient
            for atom in monomial:
                n *= atom.divisible_by if isinstance(atom, Sym) else 1
            if n.denominator != 1:
                return 1
            g = gcd(g, abs(n.numerator))
        return g

    def bounds(self) -> Interval:
        """The least and the greatest value that the facts allow, by interval arithmetic; None where there is no bound."""
        low: Fraction | None = Fraction(0)
        high: Fraction | None = Fraction(0)
        for monomial, coefficient in self.terms.items():
            term: Interval = (coefficient, coefficient)
            for atom in monomial:
                term = _product(term, atom.bounds())
            low = None if low is None or term[0] is None else low + term[0]
            high = None if high is None or term[1] is None else high + term[1]
        return low, high

    def upper(self) -> int | None:
        """An upper bound from the facts, or None."""
        high = self.bounds()[1]
        return None if high is None else floor(high)

    def nonnegative(self) -> bool:
        """True when the facts prove the value is at least 0."""
        low = self.bounds()[0]
        return low is not None and low >= 0

    def substitute(self, mapping: Mapping[str, Expr]) -> Expr:
        """Replaces symbols by expressions, also inside opaque parts."""
        total = Expr({})
        for monomial, coefficient in self.terms.items():
            product = Expr({(): coefficient})
            for atom in monomial:
                if isinstance(atom, Sym):
                    product = product * mapping.get(atom.name, Expr.of(atom))
                else:
                    product = product * _APPLY[atom.op](atom.a.substitute(mapping), atom.b.substitute(mapping))
            total = total + product
        return total

    def evaluate(self, dims: Mapping[str, int]) -> int:
        """The value for the given dims. Raises KeyError for a symbol that `dims` lacks."""
        total = Fraction(0)
        for monomial, coefficient in self.terms.items():
            n = coefficient
            for atom in monomial:
                n *= dims[atom.name] if isinstance(atom, Sym) else _opaque_value(atom, dims)
            total += n
        return int(total)

    def render(self, symbol: Callable[[str], str], call: Callable[[str, str, str], str]) -> str:
        """Python text of the expression; `symbol` names a symbol, `call` writes an opaque operation."""
        if not self.terms:
            return "0"
        parts: list[str] = []
        ordered = sorted(self.terms.items(), key=lambda t: (-len(t[0]), [a.key() for a in t[0]]))
        for monomial, coefficient in ordered:
            names = [
                symbol(a.name) if isinstance(a, Sym) else call(a.op, a.a.render(symbol, call), a.b.render(symbol, call))
                for a in monomial
            ]
            n = abs(coefficient)
            if n.numerator != 1 or not names:
                names.append(str(n.numerator))
            text = " * ".join(names)
            if n.denominator != 1:
                text = f"({text}) // {n.denominator}" if len(names) > 1 else f"{text} // {n.denominator}"
            if parts:
                parts.append(("- " if coefficient < 0 else "+ ") + text)
            else:
                parts.append(("-" if coefficient < 0 else "") + text)
        return " ".join(parts)

    def __str__(self) -> str:
        return self.render(lambda name: name, lambda op, a, b: f"{op}({a}, {b})")

    __repr__ = __str__


def _opaque_value(atom: Opaque, dims: Mapping[str, int]) -> int:
    a, b = atom.a.evaluate(dims), atom.b.evaluate(dims)
    if atom.op == "floordiv":
        return a // b
    if atom.op == "cdiv":
        return -(-a // b)
    if atom.op == "mod":
        return a % b
    return min(a, b) if atom.op == "min" else max(a, b)


def _product(a: Interval, b: Interval) -> Interval:
    """The interval of x * y. A missing bound of a factor that may be negative leaves the product without bounds."""
    (a0, a1), (b0, b1) = a, b
    if a0 is not None and a1 is not None and b0 is not None and b1 is not None:
        corners = (a0 * b0, a0 * b1, a1 * b0, a1 * b1)
        return min(corners), max(corners)
    if a0 is not None and a1 is not None and a1 <= 0:
        low, high = _product((-a1, -a0), b)
        return None if high is None else -high, None if low is None else -low
    if a0 is None or b0 is None or a0 < 0 or b0 < 0:
        return None, None
    return a0 * b0, None if a1 is None or b1 is None else a1 * b1


def _quotient(a: Interval, low: Fraction, high: Fraction | None, up: bool) -> Interval:
    """The interval of a / b, rounded down or up, for b from `low`, which is at least 1, to `high`."""

    def smallest_size(end: Fraction) -> Fraction:
        return Fraction(0) if high is None else end / high

    a_low, a_high = a
    least = None if a_low is None else smallest_size(a_low) if a_low >= 0 else a_low / low
    most = None if a_high is None else a_high / low if a_high >= 0 else smallest_size(a_high)
    rounded = ceil if up else floor
    return None if least is None else Fraction(rounded(least)), None if most is None else Fraction(rounded(most))


def _min_bounds(atom: Opaque) -> Interval:
    (a_low, a_high), (b_low, b_high) = atom.a.bounds(), atom.b.bounds()
    low = None if a_low is None or b_low is None else min(a_low, b_low)
    high = b_high if a_high is None else a_high if b_high is None else min(a_high, b_high)
    return low, high


def _max_bounds(atom: Opaque) -> Interval:
    (a_low, a_high), (b_low, b_high) = atom.a.bounds(), atom.b.bounds()
    low = b_low if a_low is None else a_low if b_low is None else max(a_low, b_low)
    high = None if a_high is None or b_high is None else max(a_high, b_high)
    return low, high


def _split_multiples(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """(q, r) with a = b q + r for a positive number b; r is left with the terms not known to be multiples of b."""
    n = b.constant
    if n is None or n <= 0:
        return None
    quotient: dict[Monomial, Fraction] = {}
    rest: dict[Monomial, Fraction] = {}
    for monomial, coefficient in a.terms.items():
        if not monomial and coefficient.denominator == 1:
            quotient[()], rest[()] = Fraction(int(coefficient) // n), Fraction(int(coefficient) % n)
            continue
        known = coefficient
        for atom in monomial:
            known *= atom.divisible_by if isinstance(atom, Sym) else 1
        (quotient if (known / n).denominator == 1 else rest)[monomial] = coefficient
    return Expr({m: c / n if m else c for m, c in quotient.items()}), Expr(rest)


def floordiv(a: IntLike, b: IntLike) -> Expr:
    """a // b, rounding down; terms that the facts make multiples of b are divided exactly."""
    a, b = Expr.of(a), Expr.of(b)
    split = _split_multiples(a, b)
    if split is None:
        folded = a.constant // b.constant if a.constant is not None and b.constant else None
        return Expr.of(Opaque("floordiv", a, b) if folded is None else folded)
    quotient, rest = split
    return quotient if rest.constant is not None else quotient + Expr.of(Opaque("floordiv", rest, b))


def cdiv(a: IntLike, b: IntLike) -> Expr:
    """a / b rounded up."""
    a, b = Expr.of(a), Expr.of(b)
    split = _split_multiples(a, b)
    if split is None:
        folded = -(-a.constant // b.constant) if a.constant is not None and b.constant else None
        return Expr.of(Opaque("cdiv", a, b) if folded is None else folded)
    quotient, rest = split
    if rest.constant is not None:
        return quotient + (1 if rest.constant else 0)
    return quotient + Expr.of(Opaque("cdiv", rest, b))


def mod(a: IntLike, b: IntLike) -> Expr:
    """a % b."""
    a, b = Expr.of(a), Expr.of(b)
    split = _split_multiples(a, b)
    if split is None:
        folded = a.constant % b.constant if a.constant is not None and b.constant else None
        return Expr.of(Opaque("mod", a, b) if folded is None else folded)
    rest = split[1]
    return rest if rest.constant is not None else Expr.of(Opaque("mod", rest, b))


def _no_quotient(a: object, b: object, given: object) -> Expr:
    """Refuses a / b of dims and numbers, of which one is `given`; what else is given knows what to do."""
    if isinstance(given, float):
        raise TraceError(f"{a} / {b} is no integer", fix="scalar(...) of the dim makes it a traced number")
    if isinstance(given, (int, Expr, Sym)):
        raise TraceError(f"{a} / {b} is no integer", fix=f"{a} // {b}, or cdiv({a}, {b}) to round up")
    return NotImplemented


def smaller(a: IntLike, b: IntLike) -> Expr:
    """min(a, b)."""
    a, b = Expr.of(a), Expr.of(b)
    if (b - a).nonnegative():
        return a
    return b if (a - b).nonnegative() else Expr.of(Opaque("min", a, b))


def larger(a: IntLike, b: IntLike) -> Expr:
    """max(a, b)."""
    a, b = Expr.of(a), Expr.of(b)
    if (a - b).nonnegative():
        return a
    return b if (b - a).nonnegative() else Expr.of(Opaque("max", a, b))


_APPLY: dict[str, Callable[[IntLike, IntLike], Expr]] = {
    "floordiv": floordiv,
    "cdiv": cdiv,
    "mod": mod,
    "min": smaller,
    "max": larger,
}


def parse_expr(text: str, names: Mapping[str, IntLike | Sym]) -> Expr:
    """Reads what `str(Expr)` prints, and the like; `names` gives the value of each name."""

    def walk(node: ast.expr) -> Expr:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return Expr.of(node.value)
        if isinstance(node, ast.Name):
            if node.id not in names:
                raise ParseError(
                    f"unknown name {node.id!r} in {text!r}", fix=f"known names: {', '.join(sorted(names))}"
                )
            return Expr.of(names[node.id])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if isinstance(node, ast.BinOp):
            a, b = walk(node.left), walk(node.right)
            if isinstance(node.op, ast.Add):
                return a + b
            if isinstance(node.op, ast.Sub):
                return a - b
            if isinstance(node.op, ast.Mult):
                return a * b
            if isinstance(node.op, ast.FloorDiv):
                return floordiv(a, b)
            if isinstance(node.op, ast.Mod):
                return mod(a, b)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _APPLY:
            return _APPLY[node.func.id](walk(node.args[0]), walk(node.args[1]))
        raise ParseError(f"cannot read {text!r} as an integer expression")

    try:
        return walk(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        raise ParseError(f"cannot read {text!r} as an integer expression") from None
