"""Structured tensor access as Triton text: pointers with masks, or tensor descriptors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from k3dsl.backends.base import MAX_GRID_YZ
from k3dsl.backends.triton.text import atom, grouped, pow2
from k3dsl.ir.graph import Index, Kernel, Op, TensorParam
from k3dsl.ir.symbols import INT32_MAX, Expr, Sym
from k3dsl.passes.affine import affine, span_in_bounds


@dataclass
class Axis:
    """One axis of the accessed tile: which tile axes it fills, and the text of its element numbers and mask."""

    index: Index
    first: int  # position of its first tile axis in the result
    rank: int  # number of tile axes it fills


def dim_text(expr: Expr, wide: bool = False) -> str:
    """A dim expression as kernel text; `wide` computes in 64 bits."""
    symbol = (lambda n: f"{n}.to(tl.int64)") if wide else (lambda n: n)

    def call(op: str, a: str, b: str) -> str:
        if op in ("min", "max"):
            return f"tl.{op}imum({a}, {b})"
        if op == "cdiv":
            more = f"{atom(a)} + {int(b) - 1}" if b.isdigit() else f"{atom(a)} + {atom(b)} - 1"
            return f"(({more}) // {atom(b)})"
        return f"({atom(a)} {'//' if op == 'floordiv' else '%'} {atom(b)})"

    return expr.render(symbol, call)


class AccessPrinter:
    """Writes the offsets and masks of one memory op."""

    def __init__(
        self,
        op: Op,
        tensor: TensorParam,
        kernel: Kernel,
        text: Callable[[int], str] = lambda slot: "0",
        share: Callable[[str, str], str] = lambda text, wish: text,
    ) -> None:
        self.op, self.tensor, self.kernel, self.text, self.share = op, tensor, kernel, text, share
        self.axes: list[Axis] = []
        position, gathered = 0, False
        for index in op.index:
            rank = {"scalar": 0, "full": 1, "span": len(index.shape), "tile": 0 if gathered else len(index.shape)}[
                index.kind
            ]
            self.axes.append(Axis(index, position, rank))
            if index.kind == "tile":
                if gathered:
                    self.axes[-1].first = next(a.first for a in self.axes if a.index.kind == "tile")
                gathered = True
            position += rank
        self.rank = position
        shape: list[int] = []
        for axis in self.axes:
            if axis.rank:
                shape.extend(axis.index.shape)
        self.shape = tuple(shape)
        order = tuple(op.attrs.get("order") or range(self.rank))
        self.order = order
        self.place = {a: k for k, a in enumerate(order)}  # where a tile axis stands in the printed nesting

    @property
    def permuted(self) -> bool:
        return self.order != tuple(range(self.rank))

    def _expand(self, text: str, tile_axes: list[int]) -> str:
        """`text` has one axis for each of tile_axes, in order; inserts the other axes with None."""
        if self.rank <= 1 or not tile_axes:
            return text
        keys = ["None"] * self.rank
        for a in tile_axes:
            keys[self.place[a]] = ":"
        if [self.place[a] for a in tile_axes] != sorted(self.place[a] for a in tile_axes):
            order = sorted(range(len(tile_axes)), key=lambda k: self.place[tile_axes[k]])
            text = f"tl.permute({text}, ({', '.join(map(str, order))}))"
        return f"{text}[{', '.join(keys)}]"

    def _arange(self, tile_axis: int) -> str:
        n = pow2(self.shape[tile_axis])
        text = f"tl.arange(0, {n})"
        hint = self.op.attrs.get("contiguity")
        if hint and tile_axis == self.rank - 1:
            text = f"tl.max_contiguous({text}, {hint})"
        return self._expand(text, [tile_axis])

    def _steps(self, axis: Axis) -> list[tuple[int, int]]:
        """(tile axis, elements from one of its places to the next) of a span or full axis; those of one place left out."""
        found: list[tuple[int, int]] = []
        step = 1
        tile_axes = range(axis.first, axis.first + axis.rank)
        wide = [a for a in tile_axes if self.shape[a] > 1] or [tile_axes[-1]]
        for a in reversed(wide):
            found.append((a, step))
            step *= self.shape[a]
        return found[::-1]

    def lanes(self, axis: Axis) -> str:
        """Element numbers 0, 1, ... along a span or full axis, over its tile axes."""
        return " + ".join(self._arange(a) + (f" * {step}" if step != 1 else "") for a, step in self._steps(axis))

    def scalar_offset(self) -> str | None:
        """The part of the offset that is one number a program, in Horner's form over the strides.

        (chunk * H + head) * 4096 keeps its inner part in 32 bits where that provably suffices, and multiplies in 64 once.
        """
        terms: list[tuple[str, Expr, Expr, bool]] = []
        for axis, stride in zip(self.axes, self.tensor.stride_exprs(), strict=True):
            index = axis.index
            if index.kind not in ("scalar", "span") or index.start is None:
                continue
            position = affine(self.op.operands[index.start], self.kernel)
            if position.constant != 0:
                # a position of 32 bits is right as it is, whatever is known of it; products of it may not be
                wide_position = self.op.operands[index.start].dtype.bits > 32
                terms.append((self.text(index.start), position, stride, wide_position))
        parts: list[_Term] = []
        text, value, unit, wide = "", Expr.of(0), Expr.of(1), False
        for number, (name, position, stride, wide_position) in enumerate(terms):
            known = position.constant
            piece = str(known) if known is not None else atom(name)
            ratio = _quotient(unit, stride) if number else None
            if ratio is None:
                if number:
                    parts.append(_Term(_scaled(text, value, unit, wide), value * unit, wide))
                text, value, wide = piece, position, wide_position
            else:
                left = atom(text)
                if not wide and exceeds(value * ratio + position):
                    wide = True
                    if not left.isdigit():
                        left = f"{left}.to(tl.int64)"
                    elif not piece.isdigit():
                        piece = f"{piece}.to(tl.int64)"
                value = value * ratio + position
                text = f"{left} * {_factor(ratio, wide)} + {piece}" if ratio.constant != 1 else f"{left} + {piece}"
                if value.constant is not None:
                    text = str(value.constant)
            unit = stride
        if not terms:
            return None
        parts.append(_Term(_scaled(text, value, unit, wide), value * unit, wide))
        return " + ".join(_summed(parts))

    def tile_offsets(self) -> tuple[list[str], list[str]]:
        """Terms of the offset that differ within the tile, 32 bits where they provably fit; and those to be added last.

        Of rows over several tile axes the innermost is added last, by itself: elements along it are mostly one thread's, and
        then share the address that everything else makes, at constant distances.
        """
        gather = next((a.first for a in self.axes if a.index.kind == "tile"), 0)
        terms: list[_Term] = []
        rows: list[_Term] = []
        for axis, stride in zip(self.axes, self.tensor.stride_exprs(), strict=True):
            index = axis.index
            if index.kind == "tile" and index.start is not None:
                v = self.op.operands[index.start]
                lanes = self._expand(atom(self.text(index.start)), list(range(gather, gather + len(v.shape))))
                terms.append(_product(lanes, Expr.of(INT32_MAX), stride, wide=True))
            elif axis.rank:
                steps = self._steps(axis)
                if len(steps) > 1 and stride.constant != 1:
                    for a, step in steps:
                        part = _product(self._arange(a), Expr.of(pow2(self.shape[a]) - 1), stride * step)
                        (rows if (a, step) == steps[-1] else terms).append(part)
                    continue
                size = 1
                for extent in index.shape:
                    size *= pow2(extent)
                terms.append(_product(self.lanes(axis), Expr.of(size - 1), stride))
        return _summed(terms), [t.text for t in rows]

    def masks(self, tensor_bounds_checked: bool = False) -> list[str]:
        """Conditions that every touched element must satisfy. Padding lanes and rows past `end` are left out.

        tensor_bounds_checked: a descriptor already clips at the tensor's own extent.
        """
        out: list[str] = []
        for number, axis in enumerate(self.axes):
            index = axis.index
            if axis.rank == 0:
                continue
            for a in range(axis.first, axis.first + axis.rank):
                if pow2(self.shape[a]) != self.shape[a]:
                    out.append(f"({self._arange(a)} < {self.shape[a]})")
            if index.kind != "span" or index.end is None or span_in_bounds(self.op, number, self.kernel):
                continue
            end = self.op.operands[index.end]
            if tensor_bounds_checked and affine(end, self.kernel) == self.tensor.shape[number]:
                continue
            assert index.start is not None
            start = self.text(index.start)
            lanes = self.lanes(axis)
            position = (
                lanes if affine(self.op.operands[index.start], self.kernel).constant == 0 else f"{start} + {lanes}"
            )
            out.append(f"({position} < {self.text(index.end)})")
        slot = self.op.attrs.get("mask_slot")
        if slot is not None:
            text = self.text(slot)
            if self.permuted:
                text = f"tl.permute({text}, ({', '.join(map(str, self.order))}))"
            out.append(atom(text))
        return out

    def pointer(self) -> str:
        base = self.tensor.name
        scalar, (tiles, rows) = self.scalar_offset(), self.tile_offsets()
        if tiles and not any(axis.index.kind == "tile" for axis in self.axes):
            tiles = [self.share(" + ".join(tiles), f"{self.tensor.name}_offsets")]
        if scalar is not None:
            base = f"{base} + {grouped(scalar)}"
        if tiles:
            joined = " + ".join(tiles)
            base = f"{base} + ({joined})" if len(tiles) > 1 else f"{base} + {grouped(joined)}"
        return " + ".join([base, *(self.share(text, f"{self.tensor.name}_rows") for text in rows)])

    def descriptor_block(self) -> tuple[tuple[int, ...], list[str]]:
        """Block shape and the coordinates of the block's corner, for an op that descriptor_reason() allows."""
        block, corner = [], []
        for axis in self.axes:
            index = axis.index
            if index.kind == "full":
                block.append(pow2(index.shape[0]))
                corner.append("0")
            else:
                assert index.start is not None
                size = 1
                for extent in index.shape:
                    size *= extent
                block.append(size if index.kind == "span" else 1)
                start = self.text(index.start)
                narrow = self.op.operands[index.start].dtype.bits <= 32
                corner.append(start if narrow else f"{atom(start)}.to(tl.int32)")
        return tuple(block), corner

    def descriptor_reason(self) -> str | None:
        """Why this access cannot use a tensor descriptor, or None."""
        if self.op.opcode == "atomic_add":
            return "an atomic add goes through pointers"
        if any(i.kind == "tile" for i in self.op.index):
            return "gathers and scatters go through pointers"
        if not 1 <= self.tensor.rank <= 5:
            return f"a descriptor has 1 to 5 axes, {self.tensor.name} has {self.tensor.rank}"
        if any(pow2(n) != n for n in self.shape):
            return "the tile's extents are not powers of two"
        block, _ = self.descriptor_block()
        if any(n > 256 for n in block):
            return f"a descriptor block has at most 256 rows an axis, this one is {list(block)}"
        if block[-1] * self.tensor.dtype.bytes < 16:
            return "the block's last axis is under 16 bytes"
        strides = self.tensor.stride_exprs()
        if strides[-1].constant != 1:
            return "the last axis is not contiguous"
        for stride in strides[:-1]:
            if (stride.divisor() * self.tensor.dtype.bytes) % 16:
                return f"stride {stride} is not known to be a multiple of 16 bytes"
        if self.op.opcode == "store" and self.masks(tensor_bounds_checked=True):
            return "a descriptor store clips only at the tensor's end, not at the span's"
        return None


@dataclass
class _Term:
    """A term of an offset: its text, its value as far as it is known, and whether it is computed in 64 bits."""

    text: str
    value: Expr
    wide: bool


def _product(lanes: str, last: Expr, stride: Expr, wide: bool = False) -> _Term:
    """Element numbers up to `last` times a stride, in 64 bits where that may not fit 32, or where `wide` asks for it."""
    wide = wide or exceeds(stride * last)
    text = f"{grouped(lanes)}.to(tl.int64)" if wide else lanes
    if stride.constant != 1:
        text = f"{grouped(text)} * {_factor(stride, wide=exceeds(stride))}"
    return _Term(text, last * stride, wide)


def _summed(terms: list[_Term]) -> list[str]:
    """The texts in an order in which no partial sum overflows: 64-bit terms first; one is made if the sum needs it."""
    terms = [_Term(t.text, t.value, t.wide or exceeds(t.value)) for t in terms]
    terms.sort(key=lambda t: not t.wide)
    if len(terms) > 1 and not terms[0].wide and exceeds(sum((t.value for t in terms), Expr.of(0))):
        first = next((t for t in terms if t.value.constant is None or not t.text.isdigit()), terms[0])
        terms.remove(first)
        terms.insert(0, _Term(f"{atom(first.text)}.to(tl.int64)", first.value, True))
    return [t.text for t in terms]


def exceeds(expr: Expr) -> bool:
    """True when the value may not fit 32 bits. A grid's second and third axis have at most 65535 programs."""
    limits = {
        name: Expr.of(Sym(name, s.divisible_by, s.min, min(s.max, MAX_GRID_YZ - 1)))
        for name, s in expr.symbols().items()
        if name in ("@pid1", "@pid2")
    }
    upper = expr.substitute(limits).upper()
    return upper is None or upper > INT32_MAX


def _quotient(a: Expr, b: Expr) -> Expr | None:
    """a / b where both are one term and b divides a, else None."""
    if len(a.terms) != 1 or len(b.terms) != 1:
        return None
    (m, c), (n, e) = next(iter(a.terms.items())), next(iter(b.terms.items()))
    rest = list(m)
    for factor in n:
        if factor not in rest:
            return None
        rest.remove(factor)
    ratio = c / e
    return Expr({tuple(rest): ratio}) if ratio.denominator == 1 else None


def _scaled(text: str, value: Expr, stride: Expr, wide: bool) -> str:
    """text * stride, in 64 bits where the product may not fit 32."""
    if value.constant is not None:
        return dim_text(stride * value, wide=exceeds(stride * value))
    if stride.constant == 1:
        return text
    if wide:
        return f"{atom(text)} * {_factor(stride, wide=exceeds(stride))}"
    if exceeds(value * stride):
        return f"{atom(text)}.to(tl.int64) * {_factor(stride, wide=exceeds(stride))}"
    return f"{atom(text)} * {_factor(stride)}"


def _factor(stride: Expr, wide: bool = False) -> str:
    text = dim_text(stride, wide)
    return text if len(stride.terms) <= 1 and "//" not in text else f"({text})"
