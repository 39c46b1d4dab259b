"""TileLang text of what goes along an axis one element after the other: scans, and reductions that TileLang does not have.

The tiles are in shared memory; each thread does whole lines of the axis.
"""

from __future__ import annotations

from k3dsl.backends.tilelang.elementwise import minmax, negated
from k3dsl.backends.tilelang.emitter import Emitter
from k3dsl.backends.tilelang.text import atom, literal, opened, tl_dtype
from k3dsl.errors import LegalityError
from k3dsl.ir.graph import Op, Region, Value
from k3dsl.ir.types import DType, f32, i32

NAMES = {"prod": "product", "argmax": "where_highest", "argmin": "where_lowest"}


def held_as(dtype: DType) -> DType:
    """The dtype in which a named reduction or scan adds up: bools as integers, narrow floats in fp32."""
    if dtype.is_bool:
        return i32
    return f32 if dtype.is_float and dtype.bits < f32.bits else dtype


class SerialPrinter(Emitter):
    """The part of `printer.Printer` for these ops."""

    def op_scan(self, op: Op) -> None:
        """Inclusive, from the axis' start or, in reverse, from its end."""
        axis, reverse = op.attrs["axis"], bool(op.attrs.get("reverse"))
        tiles = self._lines_of(op, [self.shared_tile(v, "scan", self._held(op, v)) for v in op.results])
        n = op.result.shape[axis]
        r = self.serial_name
        with self.over(_without(op.result.shape, axis)) as at:
            self.line(f"for {r} in tl.serial({n - 1}):")
            here, before = (f"{n - 2} - {r}", f"{n - 1} - {r}") if reverse else (f"{r} + 1", r)
            with self.indented():
                self._combined(
                    op, tiles, tiles, [*at[:axis], before, *at[axis + 1 :]], [*at[:axis], here, *at[axis + 1 :]]
                )

    def serial_reduce(self, op: Op) -> None:
        """A product, or the op's own combine: the first element of each line, then the others in order."""
        axis, shape = op.attrs["axis"], op.operands[0].shape
        tiles = self._lines_of(op, [self.allocate("shared", "line", v.shape, self._held(op, v)) for v in op.operands])
        n, r = shape[axis], self.serial_name
        with self.over(_without(shape, axis)) as at:
            first = [*at[:axis], "0", *at[axis + 1 :]]
            self.line(f"for {r} in tl.serial({n - 1}):")
            with self.indented():
                self._combined(op, tiles, tiles, first, [*at[:axis], f"{r} + 1", *at[axis + 1 :]], to_left=True)
        for v, tile in zip(op.results, tiles, strict=True):
            self._first_of_lines(op, v, tile, axis, self._held(op, v))

    def op_argmax(self, op: Op) -> None:
        """The lowest position of the extreme; a NaN counts as the extreme."""
        source, v, axis = op.operands[0], op.result, op.attrs["axis"]
        dtype = held_as(source.dtype)
        tile = self._lines_of(op, [self.allocate("shared", "line", source.shape, dtype)])[0]
        others = _without(source.shape, axis)
        # every element's position beside it, and both written in any case, after both are read: else TileLang puts a barrier
        # between the steps, which not all threads reach
        place = self.allocate("shared", NAMES[op.opcode], source.shape, i32)
        with self.over(source.shape) as at:
            self.line(f"{self.buffer_at(place, source.shape, at)} = {at[axis]}")
        sign, r = ">" if op.opcode == "argmax" else "<", self.serial_name
        value, position = self.name("extreme"), self.name("where")
        with self.over(others) as at:
            first, other = ([*at[:axis], n, *at[axis + 1 :]] for n in ("0", f"{r} + 1"))
            best, new = (self.buffer_at(tile, source.shape, where) for where in (first, other))
            found, here = (self.buffer_at(place, source.shape, where) for where in (first, other))
            self.line(f"for {r} in tl.serial({source.shape[axis] - 1}):")
            with self.indented():
                condition = f"{new} {sign} {best}"
                if dtype.is_float:
                    condition = f"tl.And(tl.Or({condition}, tl.isnan({new})), {negated(f'tl.isnan({best})')})"
                self.line(f"{value} = tl.if_then_else({condition}, {new}, {best})")
                self.line(f"{position} = tl.if_then_else({condition}, {here}, {found})")
                self.line(f"{best} = {value}")
                self.line(f"{found} = {position}")
        self._first_of_lines(op, v, place, axis, i32)

    op_argmin = op_argmax

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _held(self, op: Op, v: Value) -> DType:
        return v.dtype if op.attrs.get("kind") is None else held_as(v.dtype)

    def _lines_of(self, op: Op, tiles: list[str]) -> list[str]:
        """Writes the op's operands into the shared tiles."""
        for source, tile in zip(op.operands, tiles, strict=True):
            dtype = i32 if source.dtype.is_bool else held_as(source.dtype)
            if op.opcode in ("reduce", "scan"):
                dtype = self._held(op, source)
            with self.over(source.shape, op.loc) as at:
                text = opened(self.at(source, at))
                if source.dtype != dtype or source.dtype.is_bool:
                    text = f"tl.cast({text}, {tl_dtype(i32 if dtype.is_bool else dtype)})"
                self.line(f"{self.buffer_at(tile, source.shape, at)} = {text}")
        return tiles

    def _combined(
        self, op: Op, left: list[str], right: list[str], a: list[str], b: list[str], to_left: bool = False
    ) -> None:
        """One step: combines the elements at `a` and `b`, and writes the result at `b` (at `a` with `to_left`)."""
        shape = op.operands[0].shape
        xs = [self.buffer_at(t, shape, a) for t in left]
        ys = [self.buffer_at(t, shape, b) for t in right]
        targets = xs if to_left else ys
        kind = op.attrs.get("kind")
        if kind is not None:
            text = {"sum": f"{xs[0]} + {ys[0]}", "prod": f"{xs[0]} * {ys[0]}"}.get(kind) or minmax(kind, xs[0], ys[0])
            self.line(f"{targets[0]} = {text}")
            return
        region = op.regions[0]
        bools = [v.dtype.is_bool for v in op.operands]
        read = [f"({t} != 0)" if is_bool else t for t, is_bool in zip(xs + ys, bools + bools, strict=True)]
        for v, text in zip(region.args, read, strict=True):
            self.text_of[id(v)] = text
        outs = self._scalars_of(region)
        held = [self.name(v.name, "next") for v in op.results] if len(outs) > 1 else []
        for name, text, is_bool in zip(held, outs, bools, strict=False):
            self.line(f"{name} = {_number(text, is_bool)}")
        for k, target in enumerate(targets):
            self.line(f"{target} = {held[k] if held else _number(outs[0], bools[0])}")

    def _scalars_of(self, region: Region) -> list[str]:
        """The texts of what a combine region yields."""
        for inner in region.ops:
            if inner.opcode == "const":
                text = literal(inner.attrs["value"], inner.result.dtype)
            elif len(inner.results) == 1 and not inner.regions and not inner.index and not inner.result.shape:
                text = self.applied(inner, [self.scalar(o) for o in inner.operands])
            else:
                raise LegalityError(f"the TileLang backend knows no {inner.opcode} inside a combine", where=inner.loc)
            self.text_of[id(inner.result)] = atom(text)
        return [self.scalar(v) for v in region.yields]

    def _first_of_lines(self, op: Op, v: Value, tile: str, axis: int, dtype: DType) -> None:
        """The reduction's result from the first element of every line."""
        source = op.operands[0]
        name = self.shared_tile(v, NAMES.get(op.attrs.get("kind") or "", "reduced"), dtype)
        with self.over(v.shape, op.loc) as at:
            inside = [*at[:axis], "0", *at[axis + (1 if op.attrs.get("keepdim") else 0) :]]
            self.line(f"{self.buffer_at(name, v.shape, at)} = {self.buffer_at(tile, source.shape, inside)}")
        if not v.shape:
            self.text_of[id(v)] = f"({name}[0] != 0)" if v.dtype.is_bool else f"{name}[0]"


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of the lines' other axes."""
    return tuple(1 if k == axis else n for k, n in enumerate(shape))


def _number(text: str, is_bool: bool) -> str:
    return f"tl.cast({opened(text)}, tl.int32)" if is_bool else opened(text)
