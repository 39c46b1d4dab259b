"""TileLang text of what mixes the elements of a tile: products and reductions."""

from __future__ import annotations

from k3dsl.backends.tilelang.placement import Home, Placement
from k3dsl.backends.tilelang.serial import SerialPrinter, held_as
from k3dsl.backends.tilelang.text import literal, opened, tl_dtype
from k3dsl.ir.graph import Kernel, Op, Value
from k3dsl.ir.scalars import integer_range, uniform_constant
from k3dsl.ir.types import DType

REDUCED = {"sum": "total", "max": "highest", "min": "lowest", "any": "any_of", "all": "all_of", "prod": "product"}
POLICY = {"row": "FullRow", "col": "FullCol", "square": "Square"}


def neutral(kind: str, dtype: DType) -> float | int:
    """The number that a reduction of this kind leaves out of account."""
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if dtype.is_float:
        return float("-inf") if kind == "max" else float("inf")
    return integer_range(dtype)[0 if kind == "max" else 1]


class ProductPrinter(SerialPrinter):
    """The part of `printer.Printer` for these ops."""

    def __init__(self, kernel: Kernel, placement: Placement) -> None:
        super().__init__(kernel, placement)
        self._aside: list[Value] = []

    def _fragment_home(self) -> Home:
        return Home("fragment", "set aside")

    # ---- products ----------------------------------------------------------------------------------------------------

    def op_dot(self, op: Op) -> None:
        plan = self.placement.dots[id(op)]
        v = op.result
        name = self.fragment(v, plan.name)
        clear = self._start_accumulator(op, v, name)
        if plan.matrix:
            a = self._operand(plan.a, plan.a_fragment)
            b = self._operand(plan.b, False)
            options = [f"{a}, {b}, {name}"]
            if plan.a_transposed:
                options.append("transpose_A=True")
            if plan.b_transposed:
                options.append("transpose_B=True")
            options.append(f"policy=tl.GemmWarpPolicy.{POLICY[plan.policy]}")
            if clear:
                options.append("clear_accum=True")
            self.line(f"tl.gemm({', '.join(options)})", op.loc)
        else:
            self._multiply_add(op, v, name, clear)
        if self.placement.of(v).kind == "both":
            self.line(f"tl.copy({name}, {self.shared_tile(v, plan.name)})")

    def _start_accumulator(self, op: Op, v: Value, name: str) -> bool:
        """Puts the accumulator's start in place; True when it is 0 and the product may clear it."""
        if len(op.operands) < 3 or uniform_constant(op.operands[2]) == 0:
            return True
        acc = op.operands[2]
        if self.placement.of(acc).fragment and self.placement.buffer(acc) is self.placement.buffer(v):
            return False
        with self.over(v.shape, op.loc) as at:
            self.line(f"{self.buffer_at(name, v.shape, at)} = {opened(self.at(acc, at))}")
        return False

    def _operand(self, v: Value, fragment: bool) -> str:
        return self.fragments[id(self.placement.buffer(v))] if fragment else self.shared[id(v)]

    def _multiply_add(self, op: Op, v: Value, name: str, clear: bool) -> None:
        if clear:
            self.line(f"tl.fill({name}, 0.0)", op.loc)
        inner = op.operands[0].shape[-1]
        with self.over(v.shape, op.loc) as at:
            r = self.serial_name
            self.line(f"for {r} in tl.serial({inner}):")
            lead, i, j = at[:-2], at[-2], at[-1]
            a = self.at(op.operands[0], [*lead, i, r])
            b = self.at(op.operands[1], [*lead, r, j])
            if op.operands[0].dtype != v.dtype:
                a, b = (f"tl.cast({opened(t)}, {tl_dtype(v.dtype)})" for t in (a, b))
            element = self.buffer_at(name, v.shape, at)
            with self.indented():
                self.line(f"{element} = {element} + {a} * {b}")

    # ---- reductions --------------------------------------------------------------------------------------------------

    def op_reduce(self, op: Op) -> None:
        kind, axis = op.attrs.get("kind"), op.attrs["axis"]
        source, v = op.operands[0], op.result
        if kind is None or kind == "prod":
            self.serial_reduce(op)
            return
        dtype = held_as(source.dtype)
        kept = [k for k, n in enumerate(source.shape) if n != 1]
        name = self.fragment(v, REDUCED[kind], dtype)
        if axis in kept:
            tile = self._reduction_source(op, source, dtype, kind, axis)
            call = {"any": "max", "all": "min"}.get(kind, kind)
            self.line(f"tl.reduce_{call}({tile}, {name}, dim={kept.index(axis)})", op.loc)
        else:
            with self.over(v.shape, op.loc) as at:
                inside = (
                    [*at[:axis], "0", *at[axis + 1 :]] if op.attrs.get("keepdim") else [*at[:axis], "0", *at[axis:]]
                )
                self.line(f"{self.buffer_at(name, v.shape, at)} = {self._as(source, dtype, self.at(source, inside))}")
        home = self.placement.of(v)
        if home.shared:
            self.line(f"tl.copy({name}, {self.shared_tile(v, REDUCED[kind], dtype)})")
        if not v.shape:
            self.text_of[id(v)] = f"({self.shared[id(v)]}[0] != 0)" if v.dtype.is_bool else f"{self.shared[id(v)]}[0]"
        if v.dtype.is_bool:
            self.stored_as.pop(id(v), None)

    def _as(self, v: Value, dtype: DType, text: str) -> str:
        return opened(text) if v.dtype == dtype else f"tl.cast({opened(text)}, {tl_dtype(dtype)})"

    def _reduction_source(self, op: Op, source: Value, dtype: DType, kind: str, axis: int) -> str:
        """A fragment that holds the operand in the dtype it is reduced in; padding holds a number that does not count."""
        n = source.shape[axis]
        padded = self.placement.extent(n) != n
        home = self.placement.of(source)
        if home.fragment and not padded and self.stored_as.get(id(source), source.dtype) == dtype:
            return self.fragments[id(self.placement.buffer(source))]
        name = self.allocate("fragment", f"{op.result.name or REDUCED[kind]}_source", source.shape, dtype)
        with self.over(source.shape, op.loc) as at:
            text = self._as(source, dtype, self.at(source, at))
            if padded:
                text = f"tl.if_then_else({at[axis]} < {n}, {text}, {literal(neutral(kind, dtype), dtype)})"
            self.line(f"{self.buffer_at(name, source.shape, at)} = {text}")
        return name


__all__ = ["ProductPrinter"]
